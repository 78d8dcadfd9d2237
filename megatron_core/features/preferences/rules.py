"""Rules for preferences."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_core.config.run import RunConfig
from megatron_core.features.preferences.settings import has_preferences

WITHOUT_ADAPTERS = {
    "layout_invariant": "sums of its losses depend on the layout; remove --layout-invariant",
    "mtp_num_layers": "losses of multi-token prediction are means over tokens; remove --mtp-num-layers",
    "zero3_param_cpu_offload": "the reference stays on the device; remove it, or add --lora-rank",
    "zero3_param_offload_dir": "the reference stays on the device; remove it, or add --lora-rank",
}
"""Settings that cannot be used with preferences without adapters, with the reason and the remedy."""


def preference_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that preferences do not support, and missing weights of the reference."""
    if not has_preferences(config):
        return
    if config.data.full_validation:
        yield "full_validation=True cannot be used with dpo=True, whose last batch would be cut; use --eval-iters"
    if (size := config.training.micro_batch_size) % 2:
        yield f"micro_batch_size={size} would separate pairs of answers, with dpo=True; use an even number"
    if config.optional("num_experts") is not None and any(map(config.optional, ("balancing_loss", "router_z_loss"))):
        yield (
            "dpo=True cannot be used with auxiliary losses of experts, which are means over tokens; use "
            "--moe-router-load-balancing-type none and no --moe-z-loss-coeff"
        )
    if coefficient := config.optional("output_z_loss_coeff"):
        yield f"output_z_loss_coeff={coefficient:g} is a mean over tokens, which dpo=True does not have; remove it"
    coefficient = config.optional("dsa_indexer_loss_coeff")
    if config.optional("trains_indexers"):
        yield (f"dsa_indexer_loss_coeff={coefficient:g} adds a mean over tokens, which dpo=True does not have; use 0")
    if (interval := config.optional("replay_interval")) is not None:
        yield f"replay_interval={interval} compares losses of tokens, which dpo=True does not have; remove it"
    if (mode := config.optional("rerun_mode")) not in (None, "disabled"):
        yield f"rerun_mode={mode} compares losses of tokens, which dpo=True does not have; use --rerun-mode disabled"
    if config.optional("lora_rank") is None:
        yield from _reference_problems(config)


def _reference_problems(config: RunConfig) -> Iterator[str]:
    """Settings that the frozen copy of the model, which is the reference without adapters, does not support."""
    flat = config.flat()
    for name, reason in WITHOUT_ADAPTERS.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with dpo=True: {reason}"
    if config.optional("fp8_format") is not None and config.optional("fp8_recipe") == "delayed":
        yield (
            "fp8_recipe=delayed cannot be used with dpo=True and lora_rank=None: the reference has no amax histories; "
            "use another --fp8-recipe"
        )
    if config.checkpoint.load_hf is None and config.optional("pretrained_checkpoint") is None:
        yield (
            "load_hf=None and pretrained_checkpoint=None: dpo=True without adapters needs the weights of its "
            "reference, also when it resumes; give one of them"
        )
    if config.checkpoint.finetune:
        yield (
            f"finetune=True starts dpo=True from load={config.checkpoint.load}, and its reference would have other "
            "weights; give that folder as --pretrained-checkpoint, without --finetune and --load"
        )


def other_reference_problems(stored: Mapping[str, Any], config: RunConfig, folder: Path) -> Iterator[str]:
    """A checkpoint of another training, whose initial weights are not those of the reference."""
    if has_preferences(config) and config.optional("lora_rank") is None and not stored.get("dpo", False):
        yield (
            f"dpo=True, but the checkpoint {folder} is of a run without it, so the reference would have "
            "other weights; to begin with its weights, give the folder as --pretrained-checkpoint, not as --load"
        )
