"""Checks of each setting against its declaration: legal values, and the conditions under which it has an effect."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from megatron_core.config.rule_helpers import shown
from megatron_core.config.run import RunConfig, RunContext, field_types, section_types, settings
from megatron_core.config.setting import Condition
from megatron_core.config.values import describe_type, fits


def illegal_values(values: Mapping[str, Any]) -> Iterator[str]:
    """Settings whose value is illegal whatever the other settings are; ``values``: all settings by name."""
    # Every call of ``settings`` lists all features: in the loop it took 70 % of this function's time.
    declarations, types = settings(), field_types()
    misfits = set(wrong_types(values))
    for name, value in values.items():
        legal = declarations[name].legal
        if name in misfits:
            yield f"{name}={value!r} does not fit; legal: {describe_type(types[name], 'None')}"
        elif legal is not None and value is not None and not legal.contains(value):
            yield f"{name}={value!r} {legal.fault}; it must be {legal.words}"
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not _is_encodable(text):
                yield f"{name}={text!r} has a character that cannot occur in file names and flags; remove it"


def wrong_types(values: Mapping[str, Any]) -> Iterator[str]:
    """Names of settings whose value has not their type, or is none of the words that it lists."""
    types, defaults = field_types(), _defaults()
    return (name for name, value in values.items() if value is not defaults[name] and not fits(value, types[name]))


def _is_encodable(text: str) -> bool:
    try:
        # A name with a null byte or half of a surrogate pair fails only when a file is opened, hours later.
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON or YAML file
        return False


def needless_settings(values: Mapping[str, Any], run: RunContext) -> Iterator[str]:
    """Settings with another value than the default that need a condition which does not hold."""
    defaults = _defaults()
    for name, declared in settings().items():
        if values[name] != defaults[name] and (missing := _missing(declared.needs, run)) is not None:
            assigned = f"{name}={shown(values[name])}"
            if missing.excludes:
                yield f"{assigned} cannot be used with {missing.words}; remove one of them"
            else:
                yield f"{assigned} has no effect without {missing.words}; add {missing.words} or remove {name}"


def _defaults() -> dict[str, Any]:
    """The default of every setting."""
    return _defaults_of(tuple(section_types().values()))


@cache
def _defaults_of(sections: tuple[type[Any], ...]) -> dict[str, Any]:
    return {name: value for section in sections for name, value in vars(section()).items()}


def _missing(conditions: tuple[Condition, ...], run: RunContext) -> Condition | None:
    """The first condition that does not hold."""
    return next((condition for condition in conditions if not condition.holds(run)), None)


def missing_modes(config: RunConfig, names: Iterable[str]) -> dict[str, Condition]:
    """The settings among ``names`` that need a condition which does not hold, and the first such condition."""
    run = RunContext.of_sections(config.sections())
    conditions = {name: _missing(settings()[name].needs, run) for name in names}
    return {name: missing for name, missing in conditions.items() if missing is not None}


def has_effect(name: str, config: RunConfig) -> bool:
    """Whether a run on one rank reads the setting ``name``."""
    declared = settings()[name]
    return _missing(declared.needs + declared.when, RunContext.of_sections(config.sections())) is None


def unread_settings(
    config: RunConfig, world_size: int = 1, device: str = "cpu", names: Collection[str] | None = None
) -> str:
    """The settings without effect on this number of ranks and kind of device, with the reason; empty if none.

    ``names``: the settings to examine; default: all that differ from their defaults.
    """
    run = RunContext.of_sections(config.sections(), world_size=world_size, device=device)
    values, defaults = config.flat(), _defaults()
    names = [name for name in values if values[name] != defaults[name]] if names is None else names
    by_reason: dict[str, list[str]] = {}
    for name, declared in settings().items():
        if name in names and (missing := _missing(declared.needs + declared.when, run)) is not None:
            reason = f"{'with' if missing.excludes else 'without'} {missing.words}"
            by_reason.setdefault(reason, []).append(f"{name}={shown(values[name])}")
    sentences = [f"{', '.join(assigned)} ({reason})" for reason, assigned in by_reason.items()]
    if "recompute_modules" in names and config.model.recompute_granularity == "selective":
        sentences += _absent_parts(config)
    return "; ".join(sentences)


def _absent_parts(config: RunConfig) -> Iterator[str]:
    """Parts for selective recompute that no layer has."""
    model = config.model
    layers = range(model.num_layers)
    experts = "experts" in map(model.feed_forward_name, range(model.num_layers + model.added_layers))
    shared = experts and vars(model)["moe_shared_expert_intermediate_size"]
    needed = {
        "layernorm": (model.norm_placement != "post", "norms before attention and MLP"),
        "mla_up_proj": (config.optional("multi_latent_attention"), "--multi-latent-attention"),
        "mlp": (any(map(model.has_dense_mlp, layers)), "a layer without experts"),
        "moe": (experts, "--num-experts N"),
        "moe_act": (experts, "--num-experts N"),
        "shared_experts": (shared, "--moe-shared-expert-intermediate-size N"),
    }
    for module in model.recompute_modules:
        is_there, what = needed.get(module, (True, ""))
        if not is_there:
            yield f"recompute_modules={module} (without {what})"
