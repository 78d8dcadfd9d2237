"""Settings of a layout that the planner varies."""

from dataclasses import fields, replace
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.run import core_sections, feature_sections
from megatron_core.planner.layout import Layout

Settings = dict[str, Any]
NONE: Settings = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
KEPT: tuple[Settings, ...] = (
    NONE | {"cpu_offloading": False},
    NONE | {"cpu_offloading": False, "recompute_granularity": "selective"},
    {
        "cpu_offloading": False,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    NONE | {"cpu_offloading": True},
)
"""Choices for activations: store, recompute or offload; the last one requires a host with its own memory."""
LAYER_SETTINGS = (
    *("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
    *("expert_tensor_parallel_size", "sequence_parallel", "micro_batch_size", "recompute_granularity"),
    *("recompute_method", "recompute_num_layers", "cpu_offloading", "cpu_offloading_num_layers"),
)
"""Settings that determine the times of a layer."""
_SECTION = {setting.name: section for section, keys in core_sections().items() for setting in fields(keys)}
NEUTRAL = {name: value for name, value in Layout().settings().items() if not name.startswith("account_for")} | NONE
NEUTRAL |= {"micro_batch_size": 1, "cpu_offloading": False, "cpu_offloading_num_layers": 0}


def micro_batch_sizes(config: RunConfig, copies: int = 1) -> list[int]:
    """Powers of two whose product with ``copies`` divides the batch; with ``--dpo`` from 2, for pairs of answers."""
    batch = config.training.global_batch_size or 1
    powers = range(1 if config.optional("dpo") else 0, 10)
    return [1 << power for power in powers if batch % ((1 << power) * copies) == 0]


def with_settings(
    config: RunConfig, settings: Settings, sections: dict[tuple[Any, ...], Any] | None = None
) -> RunConfig:
    """Return ``config`` with new values of some settings; ``sections`` keeps the sections built from ``config``."""
    by_section: dict[str, Settings] = {}
    for name, value in settings.items():
        section_name = _SECTION.get(name) or _feature_of(name)
        by_section.setdefault(section_name, {})[name] = value
    sections = {} if sections is None else sections
    changed = {}
    for name, values in by_section.items():
        key = name, *sorted(values.items())
        if key not in sections:
            sections[key] = replace(config.sections()[name], **values)
        changed[name] = sections[key]
    if changed.keys() <= core_sections().keys():
        return replace(config, **changed)
    return RunConfig.of_sections(config.sections() | changed)


def _feature_of(setting: str) -> str:
    """The feature to which a setting belongs."""
    return next(name for name, section in feature_sections().items() if setting in section.__dataclass_fields__)


def describe_layout(config: RunConfig, world_size: int) -> str:
    """Describe a layout in words: ``tp8 pp2 v4 dp4 sp zero1 overlap mbs2 full-recompute optimizer-offload``."""
    model = config.model
    words = [str(Layout.of(config.parallel, model.num_layers, world_size)), f"mbs{config.training.micro_batch_size}"]
    if model.recompute_granularity is not None:
        words.append(f"{model.recompute_granularity}-recompute")
    words += ["optimizer-offload"] * config.optimizer.optimizer_cpu_offload
    words += ["activation-offload"] * model.cpu_offloading
    return " ".join(words)


def layer_settings(config: RunConfig) -> Settings:
    """The values of ``LAYER_SETTINGS``."""
    return {name: getattr(getattr(config, _SECTION[name]), name) for name in LAYER_SETTINGS}
