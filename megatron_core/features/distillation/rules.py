"""Rules for distillation."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.features.distillation.settings import DistillationConfig

REFUSED = {
    "dpo": "preferences have a reference of their own; remove one of them",
    "layout_invariant": "sums of its losses depend on the layout; remove --layout-invariant",
    "output_z_loss_coeff": "its loss does not compute log Z; remove --output-z-loss-coeff",
    "zero3_param_cpu_offload": "the teacher stays on the device; remove it",
    "zero3_param_offload_dir": "the teacher stays on the device; remove it",
}
"""Settings that cannot be used with a teacher, with the reason and the remedy."""


def distillation_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that distillation does not support."""
    if (folder := config.section(DistillationConfig).kd_teacher) is None:
        return
    flat = config.flat()
    for name, reason in REFUSED.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with kd_teacher={folder}: {reason}"
    if config.model.fuses_output_layer_with_loss:
        yield (
            f"cross_entropy_fusion_impl=linear stores no logits, which kd_teacher={folder} compares; use "
            "--cross-entropy-fusion-impl native"
        )
    if config.optional("fp8_format") is not None and config.optional("fp8_recipe") == "delayed":
        yield (
            f"fp8_recipe=delayed cannot be used with kd_teacher={folder}: the teacher has no amax histories; use "
            "another --fp8-recipe"
        )
