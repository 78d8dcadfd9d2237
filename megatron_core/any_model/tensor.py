"""Automatic tensor parallelism: split the linear layers and embeddings of any model over ranks by a plan.

Parameters keep their names and identity, so that tied weights stay tied and parameter groups remain valid; each gets a
``ShardSpec``, from which gradient norm, ZeRO and checkpoints follow. Source: Shoeybi et al. 2019, section 3.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.any_model.tensor_check import establish
from megatron_core.any_model.tensor_embedding import ParallelEmbedding, is_table
from megatron_core.any_model.tensor_heads import (
    FEED_FORWARD,
    KEYS_AND_VALUES,
    Heads,
    head_size,
    plain_values,
    ways_to_divide,
)
from megatron_core.any_model.tensor_plan import (
    Plan,
    check_partners,
    is_inside,
    layer_of,
    name_inside,
    outermost_of,
    smallest_regions,
    styles_of_plan,
)
from megatron_core.any_model.tensor_trial import Region, twin_of
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.collectives import copy_to_region, gather_channels, reduce_from_region, scatter_channels
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import ShardSpec, Split, replicated, spec_of, split, split_fused


class ParallelLinear(nn.Module):
    """A linear layer whose output (``colwise``) or input features (``rowwise``) are split over ``group``.

    ``transposed``: the weight is ``[in, out_dim]``, as in the Conv1D of GPT-2. With ``rowwise`` the whole bias is added
    once, after the sum.
    """

    def __init__(self, linear: Any, style: str, group: Group, *, transposed: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = linear.weight
        self.bias: nn.Parameter | None = linear.bias
        self.style = style
        self.group = group
        self.transposed = transposed
        out_dim, in_dim = (1, 0) if transposed else (0, 1)
        self.out_features = self.weight.shape[out_dim]
        self.in_features = self.weight.shape[in_dim]
        self.product: Callable[[Tensor, Any, Tensor | None], Tensor] = nn.functional.linear
        """Computes x W^T + b."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        weight = self.weight.t() if self.transposed else self.weight
        return split_product(x, self.style, self.group, lambda x, bias: self.product(x, weight, bias), self.bias)


def split_product(
    x: Tensor, style: str, group: Group, product: Callable[[Tensor, Tensor | None], Tensor], bias: Tensor | None
) -> Tensor:
    """Return x W^T + b for this rank's part of W; ``product(x, b)`` multiplies with it."""
    if style.startswith("rowwise"):
        local = scatter_channels(x, group) if style == "rowwise_split_input" else x
        summed = reduce_from_region(product(local, None), group)
        return summed if bias is None else summed + bias
    output = product(copy_to_region(x, group), bias)
    return gather_channels(output, group) if style == "colwise_gather_output" else output


def split_model(model: nn.Module, group: Group, *, plan: Plan | None = None, heads: Heads | None = None) -> None:
    """Split ``model``, whole and equal on all ranks, over ``group`` in place.

    Errors: ``ConfigError`` for a plan that does not fit the model, or after which it would compute something else;
    ``LayoutError`` for sizes that do not divide.
    """
    splitting = _Splitting(model, group, plan, heads)
    splitting.choose()
    splitting.apply()
    attributes: Any = model
    attributes.tensor_parallel_size = group.size()


def check_tensor_plan(model: nn.Module, group: Group, plan: Plan) -> None:
    """Check ``plan`` as ``split_model`` does, also for a ``group`` of one rank, and split nothing."""
    _Splitting(model, group, plan, None).choose()


def whole_tensor(parameter: nn.Parameter, groups: ParallelGroups) -> Tensor:
    """Return a copy of the whole parameter on the CPU, from the parts of all ranks; a collective call."""
    spec = spec_of(parameter)
    if not spec.splits:
        return parameter.detach().to("cpu", copy=True)
    gathered = torch.zeros(spec.global_shape, dtype=parameter.dtype, device=parameter.device)
    for piece in spec.parts:
        if piece.owned:
            gathered[piece.whole.index] = parameter.detach()[piece.local.index]
    axes = "etp-ep" if "ep" in spec.split_axes else "tp"
    return reduce_from_region(gathered, groups.group(axes)).cpu()


def conv1d() -> tuple[type, ...]:
    """The Conv1D of transformers, if a model of this process can have one."""
    module = sys.modules.get("transformers.pytorch_utils")
    return (module.Conv1D,) if module is not None else ()


def linear_types() -> tuple[type, ...]:
    """The classes of layers that can be split by columns or rows."""
    return (nn.Linear, *conv1d())


@dataclass(frozen=True)
class _ParallelLayers:
    """The layers of a model that are replaced; it does not refer to the model, of which a pipeline drops layers."""

    styles: dict[str, str]
    """Styles of linear layers and embeddings by name."""
    experts: list[str]
    """Names of modules of experts."""
    group: Group
    conv: tuple[type, ...]

    def install(self, prefix: str, root: nn.Module) -> None:
        """Replace the split layers inside of ``root``, which is the module ``prefix`` of the model or a copy of it."""
        for name, style in self.styles.items():
            if is_inside(name, prefix):
                owner, _, label = name_inside(name, prefix).rpartition(".")
                parent = root.get_submodule(owner)
                setattr(parent, label, self._parallel(style, getattr(parent, label)))
        for name in self.experts:
            if is_inside(name, prefix):
                module = root.get_submodule(name_inside(name, prefix))
                module.register_forward_pre_hook(self._copy_inputs, with_kwargs=True)
                module.register_forward_hook(lambda _, args, output: reduce_from_region(output, self.group))

    def _parallel(self, style: str, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return ParallelEmbedding(module, self.group)
        return ParallelLinear(module, style, self.group, transposed=type(module) in self.conv)

    def _copy_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Sum the gradients of tokens and routing weights over the ranks, each of which has a part of them."""

        def copied(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return copy_to_region(value, self.group) if is_float else value

        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}


class _Splitting:
    def __init__(self, model: nn.Module, group: Group, plan: Plan | None, heads: Heads | None) -> None:
        self.model = model
        self.group = group
        self.size = group.size()
        self.index = group.rank()
        self.conv = conv1d()
        self.heads = heads
        self.plan = styles_of_plan(model, plan, linear_types())
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.specs: dict[nn.Parameter, tuple[str, ShardSpec]] = {}
        self.replacements: dict[str, str] = {}
        """Styles of the modules that are replaced."""
        self.widest: dict[nn.Module, int] = {}
        """Owners of column-parallel layers, and the outputs of the widest one."""
        self.shared: dict[nn.Module, int] = {}
        """Attention modules whose key and value heads are shared by ranks, and the number of these heads."""
        self.head_entries: set[str] = set()
        """Names of parameters with one entry for each query head."""
        meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
        if meta is not None:
            raise ConfigError(f"tensor parallelism: {meta} is on the meta device; construct the model with memory")

    def choose(self) -> None:
        """Choose the split of every parameter, and check it."""
        self._measure_projections()
        for name, (style, matrices) in self.plan.items():
            module = self.modules.get(name)
            if module is None:
                self._parameter(name, style, matrices)
            elif style == "moe_tp_experts":
                continue
            elif style == "replicated_with_grad_allreduce":
                for label, parameter in module.named_parameters():
                    self._record(f"{name}.{label}", parameter, self._whole(parameter, partial=True))
            elif style == "embedding_rowwise":
                self._embedding(name, module)
            else:
                self._linear(name, module, style, matrices)
        self._split_entries_of_heads()
        self._check_tied()
        styles = self._joined_layers()
        check_partners(styles, smallest_regions(self.modules, styles))

    def _joined_layers(self) -> dict[str, str]:
        """The colwise layers whose output stays split, and the rowwise ones that join it."""
        return {name: style for name, style in self.replacements.items() if style in ("colwise", "rowwise")}

    def apply(self) -> None:
        """Split the model as chosen, and compare its parts with whole ones."""
        experts = [name for name, (style, _) in self.plan.items() if style == "moe_tp_experts"]
        layers = _ParallelLayers(self.replacements, experts, self.group, self.conv)
        regions = self._regions(layers)  # with copies of modules, which are whole until here
        for parameter, (_, spec) in self.specs.items():
            local = parameter.new_empty(spec.local_shape)
            with torch.no_grad():
                spec.localise(parameter.detach(), local)
            parameter.data = local
        for parameter in self.model.parameters():
            attributes: Any = parameter
            attributes.shard_spec = self._spec_of(parameter)
        layers.install("", self.model)
        for region in regions:
            establish(region, self.group)

    def _regions(self, parallel: _ParallelLayers) -> list[Region]:
        """Return the parts of the model whose split is to be checked, one for each structure."""
        styles = self._joined_layers()
        smallest = smallest_regions(self.modules, styles) | {name: name for name in parallel.experts}
        scopes: dict[str, tuple[nn.Module, int, int]] = {}
        for path in sorted(set(smallest.values())):
            for name, module in self.modules[path].named_modules(prefix=path):
                owns_split = any(layer_of(split).rpartition(".")[0] == name for split in styles)
                if owns_split or next(module.parameters(), None) is None:
                    scopes[name] = module, self.widest.get(module, 0), self.shared.get(module, 0)
        regions: dict[str, Region] = {}
        for path in outermost_of(smallest.values()):
            module = self.modules[path]
            own_scopes = {name_inside(name, path): scope for name, scope in scopes.items() if is_inside(name, path)}
            specs = {name: self._spec_of(parameter) for name, parameter in module.named_parameters()}
            layers = {
                name_inside(name, path): style for name, style in self.replacements.items() if is_inside(name, path)
            }
            values = [(name, id(type(child)), plain_values(child)) for name, child in module.named_modules()]
            structure = repr((layers, specs, values))
            if structure in regions:
                regions[structure].names.append(path)
                regions[structure].references.append(weakref.ref(module))
                continue
            ways = ways_to_divide(own_scopes, self.size, self.heads)
            install = partial(parallel.install, path)
            regions[structure] = Region(
                [path], [weakref.ref(module)], twin_of(module), specs, install, ways, self.heads is not None
            )
        return list(regions.values())

    def _spec_of(self, parameter: nn.Parameter) -> ShardSpec:
        return self.specs[parameter][1] if parameter in self.specs else self._whole(parameter)

    def _measure_projections(self) -> None:
        for name, (style, matrices) in self.plan.items():
            module = self.modules.get(name)
            if module is not None and style == "colwise" and type(module) in linear_types():
                owner, _, label = layer_of(name).rpartition(".")
                weight = module.get_parameter("weight")
                width = weight.shape[1 if isinstance(module, self.conv) else 0] // matrices
                if label not in FEED_FORWARD:
                    self.widest[self.modules[owner]] = max(width, self.widest.get(self.modules[owner], 0))

    def _whole(self, parameter: nn.Parameter, *, partial: bool = False) -> ShardSpec:
        return replicated(tuple(parameter.shape), self.index, partial_grad=partial)

    def _record(self, name: str, parameter: nn.Parameter, spec: ShardSpec) -> None:
        other, known = self.specs.setdefault(parameter, (name, spec))
        if known != spec:
            raise ConfigError(f"plan: {name} and {other} are one tied parameter; split both in the same dim")

    def _split(self, name: str, parameter: Any, dim: int, matrices: int) -> None:
        extent = parameter.shape[dim]
        if extent % (matrices * self.size):
            raise LayoutError(
                f"{name}: dim {dim} of {tuple(parameter.shape)} cannot be split over tensor={self.size}"
                f"{f' in {matrices} matrices' if matrices > 1 else ''}; choose a divisor of {extent // matrices}"
            )
        spec = split(tuple(parameter.shape), dim, self.index, self.size)
        if matrices > 1:
            spec = split_fused(tuple(parameter.shape), (extent // matrices,) * matrices, self.index, self.size, dim=dim)
        self._record(name, parameter, spec)

    def _parameter(self, name: str, style: str, matrices: int) -> None:
        """A parameter with a part of its gradient on each rank, or one of a module of experts: ``[..., out, in]``."""
        parameter = self.model.get_parameter(name)
        if style == "replicated_with_grad_allreduce":
            self._record(name, parameter, self._whole(parameter, partial=True))
            return
        if style not in ("colwise", "rowwise") or self.plan.get(name.rpartition(".")[0]) != ("moe_tp_experts", 1):
            raise ConfigError(
                f"plan: {name!r} is a parameter; it can have the style replicated_with_grad_allreduce, or, in a module "
                "with the style moe_tp_experts, colwise, rowwise and their packed forms; name the module instead"
            )
        dim = parameter.dim() - (2 if style == "colwise" else 1)
        self._split(name, parameter, dim, matrices)

    def _embedding(self, name: str, module: Any) -> None:
        if not is_table(module):
            raise ConfigError(
                f"plan: {name!r} has the style embedding_rowwise; it must be an nn.Embedding without max_norm and "
                "scale_grad_by_freq, or one times its embed_scale; remove it from the plan"
            )
        if module.num_embeddings % self.size == 0:  # else every rank keeps the whole table
            self._split(f"{name}.weight", module.weight, 0, 1)
            self.replacements[name] = "embedding_rowwise"

    def _linear(self, name: str, module: Any, style: str, matrices: int) -> None:
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if type(module) not in linear_types() or hooks:
            raise ConfigError(
                f"plan: {name!r} ({type(module).__name__}) has the style {style!r}; it must be an nn.Linear without "
                "hooks; remove it from the plan, or its hooks; call parallelize before quantize_frozen"
            )
        if style.startswith("rowwise") and matrices > 1:
            raise ConfigError(
                f"plan: {name!r} is a layer with the style packed_rowwise, which is for parameters; use rowwise"
            )
        out_dim, in_dim = (1, 0) if type(module) in self.conv else (0, 1)
        weight = module.weight
        bias = module.bias
        if style == "colwise_gather_output" and weight.shape[out_dim] % self.size:
            return  # every rank computes all outputs
        self.replacements[name] = style
        if style.startswith("rowwise"):
            self._split(f"{name}.weight", weight, in_dim, 1)
            return
        path, _, label = layer_of(name).rpartition(".")
        owner = self.modules[path]
        heads = self._heads(owner, weight.shape[out_dim] // matrices) if style == "colwise" else 0
        if heads % self.size:
            may_share = label in KEYS_AND_VALUES or weight.shape[out_dim] < self.widest[owner]
            if may_share and self.size % heads == 0 and matrices == 1:
                self.shared[owner] = heads
                for suffix, parameter, dim in (("weight", weight, out_dim), ("bias", bias, 0)):
                    if parameter is not None:
                        self._record(f"{name}.{suffix}", parameter, self._shared(parameter, dim, heads))
                return
            raise LayoutError(
                f"{name}: {heads} attention heads cannot be split over tensor={self.size}; choose a divisor of "
                f"{heads}{', or a multiple of it' if may_share else ''}"
            )
        self._split(f"{name}.weight", weight, out_dim, matrices)
        if bias is not None:
            self._split(f"{name}.bias", bias, 0, matrices)

    def _split_entries_of_heads(self) -> None:
        """Split parameters of attention modules that have one entry for each query head, such as attention sinks."""
        paths = {module: path for path, module in self.modules.items()}
        for owner, width in self.widest.items():
            heads = self._heads(owner, width)
            for label, parameter in owner.named_parameters(recurse=False):
                name = f"{paths[owner]}.{label}"
                if heads > 1 and parameter.numel() == heads and parameter not in self.specs:
                    self.head_entries.add(name)
                    self._split(name, parameter, parameter.shape.index(heads), 1)

    def _heads(self, owner: nn.Module, width: int) -> int:
        """Number of heads in ``width`` outputs of an attention module, or 0 in other modules."""
        size = head_size(owner, self.widest.get(owner, 0), self.heads)
        return width // size if size and width % size == 0 else 0

    def _shared(self, parameter: nn.Parameter, dim: int, heads: int) -> ShardSpec:
        """One key or value head per rank, held by several ranks, each of which has a part of its gradient."""
        rows = parameter.shape[dim] // heads
        sharers = self.size // heads
        ranges = tuple(((i // sharers * rows, (i // sharers + 1) * rows),) for i in range(self.size))
        return ShardSpec(tuple(parameter.shape), (Split(dim, "tp", ranges),), (("tp", self.index),))

    def _check_tied(self) -> None:
        for path, module in self.modules.items():
            for label, parameter in module._parameters.items():
                name = f"{path}.{label}".lstrip(".")
                known = None if parameter is None else self.specs.get(parameter)
                in_plan = path in self.replacements or name in self.plan or name in self.head_entries
                if known and known[1].splits and not in_plan:
                    raise ConfigError(
                        f"plan: {name} is tied to {known[0]}, which is split; add {path!r} to the plan, or remove the "
                        "other"
                    )
