"""Plans of tensor parallelism: the style of each module of a model, by name.

A plan maps names with ``*`` for the indices of layers to styles. It comes from the caller, from the model (``_tp_plan``
of transformers), or from the names of its linear layers (as DeepSpeed's AutoTP).
"""

import re
import warnings
from collections.abc import Iterable, Mapping

from torch import nn

from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import listed

Plan = Mapping[str, str]
STYLES = {
    "colwise": "output features are split",
    "packed_colwise": "the output concatenates 2 matrices (`packed_colwise:3`: 3), each of which is split",
    "packed_rowwise": "for a parameter of experts `[..., in, out]` whose last dim concatenates 2 matrices",
    "colwise_gather_output": "output features are split and gathered",
    "rowwise": "input features are split; outputs are summed",
    "rowwise_split_input": "as rowwise, for an input that every rank has whole",
    "embedding_rowwise": "rows of the table are split; outputs are summed",
    "replicated_with_grad_allreduce": "whole, a module or parameter for split features; gradients are summed",
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
HEAD_NORMS = r".*\.\d+\..*\b[qk]_(norm|layernorm)"
"""Names of norms of heads, whose gradients are sums over the heads of all ranks."""


def check_plan_type(name: str, plan: object) -> None:
    """ConfigError unless the argument ``name`` is None, or a dict with entries."""
    if plan is not None and (not isinstance(plan, Mapping) or not plan):
        raise ConfigError(f"{name}={plan!r} must be a dict of styles by names of modules, with one entry or more")


def styles_of_plan(
    model: nn.Module, chosen: Plan | None, is_linear: type | tuple[type, ...]
) -> dict[str, tuple[str, int]]:
    """Return (style, number of packed matrices) for each name of a module or parameter in the plan.

    Errors: ``ConfigError`` for names that match nothing and for unknown styles.
    """
    plan = chosen if chosen is not None else getattr(model, "_tp_plan", None)
    if chosen is None and not plan:
        return _by_rules(model, is_linear)
    assert plan is not None
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    styles: dict[str, tuple[str, int]] = {}
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise ConfigError(f"plan: {pattern!r} must be the name of a module")
        parsed = _style(pattern, style)
        # A model with adapters of peft contains the model with the plan.
        expression = r"(base_model\.model\.)?" + re.escape(pattern).replace(r"\*", "[^.]+")
        matches = [name for name in names if re.fullmatch(expression, name)]
        if not matches and chosen is not None:
            raise ConfigError(
                f"plan: {pattern!r} matches no module or parameter of {type(model).__name__}; its modules are "
                f"{listed([name for name in names if name])}; correct the name"
            )
        if parsed is not None:
            styles.update(dict.fromkeys(matches, parsed))
    if chosen is None and not any(re.search(r"\.\d+\.", name) for name in styles):
        # The plan of Qwen3-VL has the embedding and the output layer alone.
        return {**_by_rules(model, is_linear), **styles}
    return _with_adapters(model, styles)


def _with_adapters(model: nn.Module, styles: Mapping[str, tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Replace layers with adapters of peft, y = W x + s B A x, by W and the matrix that is split as W is.

    It is B, with the outputs of W, or A, with its inputs; the other one is whole on every rank. A table with an adapter
    stays whole. Errors: ``ConfigError`` for DoRA.
    """
    modules = dict(model.named_modules())
    expanded: dict[str, tuple[str, int]] = {}
    for name, style in styles.items():
        module = modules.get(name)
        if not isinstance(module, nn.Module) or not {"base_layer", "lora_A", "lora_B"} <= module._modules.keys():
            expanded[name] = style
            continue
        if style[0] == "embedding_rowwise":
            continue
        if module._modules.get("lora_magnitude_vector"):
            raise ConfigError(
                f"tensor parallelism: {name} has an adapter with use_dora=True, which needs the norms of whole rows; "
                "set it to False"
            )
        side = "lora_A" if style[0].startswith("rowwise") else "lora_B"
        labels = ["base_layer", *(f"{side}.{label}" for label in module.get_submodule(side)._modules)]
        expanded.update({f"{name}.{label}": style for label in labels})
    return expanded


def layer_of(name: str) -> str:
    """Return the name of the linear layer whose weight, or whose adapter of peft, is in the module ``name``."""
    return re.sub(r"\.(base_layer|lora_[AB]\.[^.]+)$", "", name)


def _style(pattern: str, style: str) -> tuple[str, int] | None:
    name, _, matrices = str(style).partition(":")
    name = ALIASES.get(name, name)
    if name in WITHOUT_SPLIT:
        return None
    base = name.removeprefix("packed_")
    if name not in STYLES or (matrices and (base == name or not matrices.isdecimal() or int(matrices) < 1)):
        raise ConfigError(f"plan: {pattern!r} has the style {style!r}, which is not supported; use {listed([*STYLES])}")
    return (name, 1) if base == name else (base, int(matrices or 2))


def _by_rules(model: nn.Module, is_linear: type | tuple[type, ...]) -> dict[str, tuple[str, int]]:
    styles: dict[str, tuple[str, int]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if isinstance(modules[name.rpartition(".")[0]], nn.MultiheadAttention):
            continue  # it reads the weights of its projections itself
        style = next((style for rule, style in RULES.items() if re.fullmatch(rule, f".{name}")), None)
        if isinstance(module, is_linear) and style is not None:
            parsed = _style(name, style)
            assert parsed is not None
            styles[name] = parsed
    regions = smallest_regions(modules, {name: style for name, (style, _) in styles.items()})
    alone = [name for name in styles if name not in regions]
    if not regions:
        raise ConfigError(
            f"tensor parallelism: {type(model).__name__} has no plan, and the names of its linear layers are not those "
            "of a known transformer; give plan={'layers.*.q_proj': 'colwise', ...} to megatron_core.parallelize"
        )
    if alone:
        warnings.warn(
            f"tensor parallelism: {listed(alone)} stay whole on every rank, because no layer with a known name splits "
            "their input or sums their output; give plan= to megatron_core.parallelize to split them",
            stacklevel=2,
        )
    split = {name: style for name, style in styles.items() if name in regions}
    inside_regions = {*regions.values()}
    norms = [name for name in modules if re.fullmatch(HEAD_NORMS, f".{name}")]
    partial = [name for name in norms if name.rpartition(".")[0] in inside_regions]
    return {**split, **dict.fromkeys(partial, ("replicated_with_grad_allreduce", 1))}


def is_inside(name: str, path: str) -> bool:
    """Whether the module ``name`` is the module ``path`` or inside of it."""
    return not path or name == path or name.startswith(f"{path}.")


def name_inside(name: str, path: str) -> str:
    """Return the name of a module as seen from the module ``path`` around it."""
    return name.removeprefix(path).removeprefix(".") if path else name


def outermost_of(paths: Iterable[str]) -> list[str]:
    """Return the paths that are inside of no other."""
    unique = list(dict.fromkeys(paths))
    return [path for path in unique if not any(other != path and is_inside(path, other) for other in unique)]


def smallest_regions(modules: Mapping[str, nn.Module], styles: Mapping[str, str]) -> dict[str, str]:
    """Return, for each split layer with a partner, the innermost module with a forward around both.

    ``styles`` has the colwise layers, whose output stays split, and the rowwise ones, whose input is split. The partner
    of a layer has the other style and the same innermost module: the output layer of an attention is not that of
    a feed-forward layer around it.
    """
    around: dict[str, str] = {}
    for name, style in styles.items():
        partners = [other for other, other_style in styles.items() if other_style != style]
        path = name
        while path and name not in around:
            path = path.rpartition(".")[0]
            if _calls_parts(modules[path]) and any(is_inside(other, path) for other in partners):
                around[name] = path
    pairs = {(path, styles[name]) for name, path in around.items()}
    return {name: path for name, path in around.items() if {(path, "colwise"), (path, "rowwise")} <= pairs}


def _calls_parts(module: nn.Module) -> bool:
    """Whether the modules inside of ``module`` run in its forward."""
    return type(module).forward is not nn.Module.forward and not getattr(module, "runs_layers_apart", False)


def check_partners(styles: Mapping[str, str], regions: Mapping[str, str]) -> None:
    """ConfigError if the output or the input of a split layer would be a part of what it should be."""
    for name, style in styles.items():
        if name not in regions:
            needs = "row-parallel layer that sums its output" if style == "colwise" else "column-parallel layer"
            fix = "colwise_gather_output" if style == "colwise" else "rowwise_split_input"
            raise ConfigError(
                f"plan: {name!r} has the style {style!r}, but there is no {needs} in the same module; add this layer "
                f"to the plan, or use the style {fix!r}"
            )
