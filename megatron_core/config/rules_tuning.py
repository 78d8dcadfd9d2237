"""Rules for low-rank adapters, preferences and distillation."""

from collections.abc import Callable, Iterable, Iterator

from megatron_core.config.linear_layers import LinearLayer, linear_layers, mlp_layers
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.rules_attention import model_problems
from megatron_core.config.rules_hybrid import hybrid_problems
from megatron_core.config.rules_moe import moe_problems
from megatron_core.config.rules_recurrent import recurrent_problems
from megatron_core.config.rules_single import exclusive, illegal_values, shown
from megatron_core.config.run import RunConfig
from megatron_core.config.tuning import NAMES, PARTS, WHOLE

OF_LAYERS = illegal_values, model_problems, recurrent_problems, hybrid_problems, moe_problems
"""Rules for the settings that determine the layers of a model."""
REFUSED = {
    "layout_invariant": "sums of adapters depend on the layout; remove --layout-invariant",
    "compile": "layers with adapters are not compiled; remove --compile",
    "mtp_num_layers": "layers of multi-token prediction have no adapters; remove --mtp-num-layers",
    "moe_latent_size": "the projections of latent experts have no adapters; remove --lora-rank",
    "fp8_param_gather": "frozen weights are not gathered in FP8; remove --fp8-param-gather",
    "use_mup": "its rates and factors are those of hidden matrices; remove --use-mup",
}
"""Settings that cannot be used with adapters, with the reason and the remedy."""


REFUSED_WITH_PREFERENCES = {
    "layout_invariant": "sums of its losses depend on the layout; remove --layout-invariant",
    "mtp_num_layers": "losses of multi-token prediction are means over tokens; remove --mtp-num-layers",
    "zero3_param_cpu_offload": "the reference stays on the device; remove it, or add --lora-rank",
    "zero3_param_offload_dir": "the reference stays on the device; remove it, or add --lora-rank",
}
"""Settings that cannot be used with preferences without adapters, with the reason and the remedy."""

REFUSED_WITH_TEACHER = {
    "dpo": "preferences have a reference of their own; remove one of them",
    "layout_invariant": "sums of its losses depend on the layout; remove --layout-invariant",
    "output_z_loss_coeff": "its loss does not compute log Z; remove --output-z-loss-coeff",
    "zero3_param_cpu_offload": "the teacher stays on the device; remove it",
    "zero3_param_offload_dir": "the teacher stays on the device; remove it",
}
"""Settings that cannot be used with a teacher, with the reason and the remedy."""


def tuning_problems(config: RunConfig) -> Iterator[str]:
    """Settings that adapters do not support, and contradictory names of layers."""
    tuning, model = config.tuning, config.model
    if (folder := tuning.pretrained_checkpoint) is not None and config.checkpoint.load_hf is not None:
        yield exclusive(f"pretrained_checkpoint={folder}", f"load_hf={config.checkpoint.load_hf}")
    yield from _preference_problems(config)
    yield from _distillation_problems(config)
    if tuning.lora_rank is None:
        return
    flat = config.flat()
    for name, reason in REFUSED.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with lora_rank={tuning.lora_rank}: {reason}"
    yield from _target_problems(config)
    adapts_experts = model.num_experts is not None and _adapts(config, mlp_layers, experts=True)
    if tuning.use_dora and adapts_experts:
        yield (
            "use_dora=True cannot be used with adapters of experts; name only other layers in --lora-target-modules, "
            "such as linear_qkv and linear_proj"
        )
    if tuning.lora_dropout and adapts_experts:
        yield (
            f"lora_dropout={tuning.lora_dropout:g} cannot be used with adapters of experts, whose rows have no "
            "positions; use 0, or name only other layers in --lora-target-modules"
        )
    if tuning.lora_dropout and model.recomputes("mla_up_proj"):
        yield (
            f"lora_dropout={tuning.lora_dropout:g} cannot be used with mla_up_proj in recompute_modules; remove "
            "mla_up_proj"
        )


def _preference_problems(config: RunConfig) -> Iterator[str]:
    if not config.data.dpo:
        return
    if (size := config.training.micro_batch_size) % 2:
        yield f"micro_batch_size={size} would separate pairs of answers, with dpo=True; use an even number"
    if config.model.num_experts is not None and (config.model.balancing_loss or config.model.router_z_loss):
        yield (
            "dpo=True cannot be used with auxiliary losses of experts, which are means over tokens; use "
            "--moe-router-load-balancing-type none and no --moe-z-loss-coeff"
        )
    if config.model.output_z_loss_coeff:
        yield (
            f"output_z_loss_coeff={config.model.output_z_loss_coeff:g} is a mean over tokens, which dpo=True does not "
            "have; remove it"
        )
    if config.model.trains_indexers:
        yield (
            f"dsa_indexer_loss_coeff={config.model.dsa_indexer_loss_coeff:g} adds a mean over tokens, which dpo=True "
            "does not have; use 0"
        )
    if (interval := config.resilience.replay_interval) is not None:
        yield f"replay_interval={interval} compares losses of tokens, which dpo=True does not have; remove it"
    if (mode := config.resilience.rerun_mode) != "disabled":
        yield f"rerun_mode={mode} compares losses of tokens, which dpo=True does not have; use --rerun-mode disabled"
    if config.tuning.lora_rank is not None:
        return
    flat = config.flat()
    for name, reason in REFUSED_WITH_PREFERENCES.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with dpo=True: {reason}"
    if config.training.fp8_format is not None and config.training.fp8_recipe == "delayed":
        yield (
            "fp8_recipe=delayed cannot be used with dpo=True and lora_rank=None: the reference has no amax histories; "
            "use another --fp8-recipe"
        )
    if config.checkpoint.load_hf is None and config.tuning.pretrained_checkpoint is None:
        yield (
            "load_hf=None and pretrained_checkpoint=None: dpo=True without adapters needs the weights of its "
            "reference, also when it resumes; give one of them"
        )
    if config.checkpoint.finetune:
        yield (
            f"finetune=True starts dpo=True from load={config.checkpoint.load}, and its reference would have other "
            "weights; give that folder as --pretrained-checkpoint, without --finetune and --load"
        )


def _distillation_problems(config: RunConfig) -> Iterator[str]:
    if (folder := config.tuning.kd_teacher) is None:
        return
    flat = config.flat()
    for name, reason in REFUSED_WITH_TEACHER.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with kd_teacher={folder}: {reason}"
    if config.model.fuses_output_layer_with_loss:
        yield (
            f"cross_entropy_fusion_impl=linear stores no logits, which kd_teacher={folder} compares; use "
            "--cross-entropy-fusion-impl native"
        )
    if config.training.fp8_format is not None and config.training.fp8_recipe == "delayed":
        yield (
            f"fp8_recipe=delayed cannot be used with kd_teacher={folder}: the teacher has no amax histories; use "
            "another --fp8-recipe"
        )


def _target_problems(config: RunConfig) -> Iterator[str]:
    tuning = config.tuning
    if not tuning.lora_target_modules:
        yield "lora_target_modules=() leaves nothing to train; name layers, or all-linear"
    unknown = [each for each in tuning.lora_target_modules if each.rpartition(".")[2] not in NAMES]
    if unknown:
        yield f"lora_target_modules={shown(tuple(unknown))} are unknown layers; legal: {', '.join(NAMES)}"
    elif not any(fault for rule in OF_LAYERS for fault in rule(config)):  # otherwise the layers are not known
        yield from _absent_targets(config)
    for module in dict.fromkeys(module for module, _ in PARTS):
        named = {
            part for target in tuning.lora_target_modules for layer, part in NAMES.get(target, ()) if layer == module
        }
        parts = dict.fromkeys(part for (layer, _), own in PARTS.items() if layer == module for part in own)
        if WHOLE in named and len(named) > 1:
            yield (
                f"lora_target_modules={shown(tuning.lora_target_modules)} names {module} and some of its parts "
                f"{', '.join(parts)}; name either the whole matrix or parts"
            )
        overlaps = [part for part in named & {"qkv", "z", "b", "a"} if {"qkvz", "ba"} & named and module == "in_proj"]
        if overlaps:
            yield (
                f"lora_target_modules={shown(tuning.lora_target_modules)} names parts of in_proj that overlap; name "
                "in_proj_qkvz in_proj_ba (Qwen3-Next), or in_proj_qkv in_proj_z in_proj_b in_proj_a (Qwen3.5)"
            )


def _absent_targets(config: RunConfig) -> Iterator[str]:
    """A problem if no name stands for a layer. As in PEFT, some may stand for none: lists are used for many models."""
    if not _adapts(config, linear_layers):
        names = shown(config.tuning.lora_target_modules)
        yield f"lora_target_modules={names} names no layer of this model; name other layers"


def _adapts(config: RunConfig, layers: Callable[..., Iterable[LinearLayer]], *, experts: bool = False) -> bool:
    """Whether a name stands for one of the linear ``layers`` of the model; ``experts``: for one in an expert."""
    return any(
        config.tuning.parts_of(f"decoder.layers.{number}.{each.path}", fused=len(each.pieces))
        for number in range(config.model.num_layers)
        for each in layers(config.model, ParallelConfig(), number)
        if each.experts or not experts
    )
