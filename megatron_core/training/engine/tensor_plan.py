"""Plans of tensor parallelism: the style of each module of a model, by name.

A plan maps names with ``*`` for the indices of layers to styles. It comes from the caller, from the model (``_tp_plan``
of transformers), or from the names of its linear layers (as DeepSpeed's AutoTP).
"""

import re
from collections.abc import Mapping

from torch import nn

from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import listed

Plan = Mapping[str, str]
STYLES = {
    "colwise": "output features are split",
    "packed_colwise": "the output concatenates 2 matrices (`packed_colwise:3`: 3), each of which is split",
    "colwise_gather_output": "output features are split and gathered",
    "rowwise": "input features are split; outputs are summed",
    "rowwise_split_input": "as rowwise, for an input that every rank has whole",
    "embedding_rowwise": "rows of the table are split; outputs are summed",
    "replicated_with_grad_allreduce": "whole on every rank, applied to split features; gradients are summed",
    "moe_tp_experts": "a module of experts whose parameters have their own styles; outputs are summed",
}
ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
WITHOUT_SPLIT = frozenset({"replicate"})

COLWISE = (
    r"(q_proj|k_proj|v_proj|query|key|value|q_lin|k_lin|v_lin"
    r"|gate_proj|up_proj|fc1|c_fc|w1|w3|intermediate\.dense|lin1)"
)
ROWWISE = r"(o_proj|out_proj|down_proj|fc2|c_proj|w2|output\.dense|out_lin|lin2)"
RULES = {rf".*\.\d+\..*\b{COLWISE}": "colwise", rf".*\.\d+\.(.*\.)?{ROWWISE}": "rowwise"}
RULES |= {r".*\.\d+\..*\bc_attn": "packed_colwise:3"}
"""Styles of linear layers inside the layers of a model, by regular expressions of their names."""


def plan_of(model: nn.Module, given: Plan | None, is_linear: type | tuple[type, ...]) -> dict[str, tuple[str, int]]:
    """Return (style, number of packed matrices) for each name of a module or parameter in the plan.

    Errors: ``ConfigError`` for names that match nothing and for unknown styles.
    """
    plan = given if given is not None else getattr(model, "_tp_plan", None)
    if not plan:
        return _by_rules(model, is_linear)
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, tuple[str, int]] = {}
    for pattern, style in plan.items():
        parsed = _style(pattern, style)
        expression = re.escape(pattern).replace(r"\*", "[^.]+")
        matches = [name for name in names if re.fullmatch(expression, name)]
        if not matches and given is not None:
            raise ConfigError(
                f"plan: {pattern!r} matches no module or parameter of {type(model).__name__}; its modules are "
                f"{listed([name for name in names if name])}; correct the name"
            )
        if parsed is not None:
            found.update(dict.fromkeys(matches, parsed))
    return found


def _style(pattern: str, style: str) -> tuple[str, int] | None:
    name, _, parts = str(style).partition(":")
    name = ALIASES.get(name, name)
    if name in WITHOUT_SPLIT:
        return None
    if name not in STYLES or (parts and (name != "packed_colwise" or not parts.isdecimal() or int(parts) < 1)):
        raise ConfigError(f"plan: {pattern!r} has the style {style!r}, which is not supported; use {listed([*STYLES])}")
    return ("colwise", int(parts or 2)) if name == "packed_colwise" else (name, 1)


def _by_rules(model: nn.Module, is_linear: type | tuple[type, ...]) -> dict[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for name, module in model.named_modules():
        style = next((style for rule, style in RULES.items() if re.fullmatch(rule, f".{name}")), None)
        if isinstance(module, is_linear) and style is not None:
            parsed = _style(name, style)
            assert parsed is not None
            found[name] = parsed
    kinds = {style for style, _ in found.values()}
    if kinds != {"colwise", "rowwise"}:
        raise ConfigError(
            f"tensor parallelism: {type(model).__name__} has no plan, and the names of its linear layers are not those "
            "of a known transformer; give plan={'layers.*.q_proj': 'colwise', ...} to megatron_core.parallelize"
        )
    return found
