"""Rules for low-rank adapters."""

from collections.abc import Iterator
from dataclasses import replace

from megatron_core.config.linear_layers import LinearLayer, linear_layers
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.rule_helpers import exclusive, shown
from megatron_core.config.rules_attention import model_problems
from megatron_core.config.rules_single import illegal_values
from megatron_core.config.run import RunConfig
from megatron_core.feature import features
from megatron_core.features.lora.settings import NAMES, PARTS, WHOLE, TuningConfig

REFUSED = {
    "layout_invariant": "sums of adapters depend on the layout; remove --layout-invariant",
    "compile": "layers with adapters are not compiled; remove --compile",
    "mtp_num_layers": "layers of multi-token prediction have no adapters; remove --mtp-num-layers",
    "moe_latent_size": "the projections of latent experts have no adapters; remove --lora-rank",
    "fp8_param_gather": "frozen weights are not gathered in FP8; remove --fp8-param-gather",
    "use_mup": "its rates and factors are those of hidden matrices; remove --use-mup",
}
"""Settings that cannot be used with adapters, with the reason and the remedy."""


def has_adapters(config: RunConfig) -> bool:
    """Whether linear layers have adapters."""
    return config.section(TuningConfig).lora_rank is not None


def tuning_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that adapters do not support, and contradictory names of layers."""
    tuning = config.section(TuningConfig)
    model = config.model
    # Other features also start from --pretrained-checkpoint, so that this rule does not depend on adapters.
    if (folder := tuning.pretrained_checkpoint) is not None and config.checkpoint.load_hf is not None:
        yield exclusive(f"pretrained_checkpoint={folder}", f"load_hf={config.checkpoint.load_hf}")
    if tuning.lora_rank is None:
        return
    for name, reason in REFUSED.items():
        if value := config.optional(name):
            yield f"{name}={value} cannot be used with lora_rank={tuning.lora_rank}: {reason}"
    yield from _target_problems(config, world_size)
    adapts_experts = any(
        tuning.parts_of(path, fused=len(layer.pieces)) for path, layer in _linear_layers(config) if layer.experts
    )
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


def _target_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    tuning = config.section(TuningConfig)
    if not tuning.lora_target_modules:
        yield "lora_target_modules=() leaves nothing to train; name layers, or all-linear"
    unknown = [target for target in tuning.lora_target_modules if target.rpartition(".")[2] not in NAMES]
    if unknown:
        yield f"lora_target_modules={shown(tuple(unknown))} are unknown layers; legal: {', '.join(NAMES)}"
    # If there are faults in the settings of layers, the layers are not known.
    elif not any(_faults_of_layers(config, world_size)):
        yield from _unused_targets(config)
    for module in dict.fromkeys(module for module, _ in PARTS):
        named = {
            weight_part
            for target in tuning.lora_target_modules
            for layer, weight_part in NAMES.get(target, ())
            if layer == module
        }
        named_parts = dict.fromkeys(
            weight_part
            for (layer, _), names_of_parts in PARTS.items()
            if layer == module
            for weight_part in names_of_parts
        )
        if WHOLE in named and len(named) > 1:
            yield (
                f"lora_target_modules={shown(tuning.lora_target_modules)} names {module} and some of its parts "
                f"{', '.join(named_parts)}; name either the whole matrix or parts"
            )
        overlaps = [
            weight_part
            for weight_part in named & {"qkv", "z", "b", "a"}
            if {"qkvz", "ba"} & named and module == "in_proj"
        ]
        if overlaps:
            yield (
                f"lora_target_modules={shown(tuning.lora_target_modules)} names parts of in_proj that overlap; name "
                "in_proj_qkvz in_proj_ba (Qwen3-Next), or in_proj_qkv in_proj_z in_proj_b in_proj_a (Qwen3.5)"
            )


def _faults_of_layers(config: RunConfig, world_size: int) -> Iterator[str]:
    """Faults of the settings that determine the layers of a model."""
    yield from illegal_values(config.flat())
    yield from model_problems(config)
    for feature in features():
        if feature.layers and feature.problems is not None:
            yield from feature.problems(config, world_size)


def _unused_targets(config: RunConfig) -> Iterator[str]:
    """Targets that stand for no layer. As in PEFT, some names may do so: lists of names are used for many models."""
    tuning = config.section(TuningConfig)
    targets = tuning.lora_target_modules
    layers: dict[str, list[tuple[str, int]]] = {}
    for path, layer in _linear_layers(config):
        layers.setdefault(path.rpartition(".")[2], []).append((path, len(layer.pieces)))

    def has_layer(target: str) -> bool:
        alone = replace(tuning, lora_target_modules=(target,))
        modules = dict(NAMES[target.rpartition(".")[2]])
        return any(alone.parts_of(path, fused=count) for name in modules for path, count in layers.get(name, ()))

    unused = tuple(target for target in targets if not has_layer(target))
    if len(unused) == len(targets):
        yield f"lora_target_modules={shown(targets)} names no layer of this model; name other layers"
    elif paths := tuple(target for target in unused if "." in target):
        yield (
            f"lora_target_modules={shown(paths)}: no layer of this model has such a path; it must be the end of "
            "decoder.layers.0.mlp.linear_fc2 or a similar name, with * for other parts, as *.layers.0.*.q_proj"
        )


def _linear_layers(config: RunConfig) -> Iterator[tuple[str, LinearLayer]]:
    """The linear layers of the model with their paths."""
    for number in range(config.model.num_layers):
        for layer in linear_layers(config.model, ParallelConfig(), number):
            yield f"decoder.layers.{number}.{layer.path}", layer
