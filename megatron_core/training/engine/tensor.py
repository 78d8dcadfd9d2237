"""Automatic tensor parallelism: split the linear layers and embeddings of any model over ranks by a plan.

Parameters keep their names and identity, so that tied weights stay tied and parameter groups remain valid; each gets a
``ShardSpec``, from which gradient norm, ZeRO and checkpoints follow. Source: Shoeybi et al. 2019, section 3.
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.collectives import copy_to_region, gather_channels, reduce_from_region, scatter_channels
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.sharding import ShardSpec, Split, replicated, spec_of, split, split_fused
from megatron_core.tensor_parallel.fp8 import FP8Products
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.tensor_parallel.lookup import vocab_parallel_lookup
from megatron_core.training.engine.module import broadcast_from_first
from megatron_core.training.engine.tensor_plan import Plan, plan_of

HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "n_kv_heads")
HEAD_WIDTHS = ("all_head_size", "split_size")
"""Attributes of attention modules that are proportional to the number of heads of a rank."""
KEYS_AND_VALUES = ("k_proj", "v_proj", "key", "value", "wk", "wv")


class ParallelLinear(nn.Module):
    """A linear layer whose output (``colwise``) or input features (``rowwise``) are split over ``group``.

    ``transposed``: the weight is ``[in, out]``, as in the Conv1D of GPT-2. With ``rowwise`` the whole bias is added
    once, after the sum.
    """

    def __init__(self, linear: Any, style: str, group: Group, *, transposed: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter = linear.weight
        self.bias: nn.Parameter | None = linear.bias
        self.style, self.group, self.transposed = style, group, transposed
        out, into = (1, 0) if transposed else (0, 1)
        self.out_features, self.in_features = self.weight.shape[out], self.weight.shape[into]
        self.fp8: FP8Products | None = None
        """If given, computes the matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` -> ``[..., out]``."""
        weight = self.weight.t() if self.transposed else self.weight
        if self.style.startswith("rowwise"):
            own = scatter_channels(x, self.group) if self.style == "rowwise_split_input" else x
            whole = reduce_from_region(self._product(own, weight, None), self.group)
            return whole if self.bias is None else whole + self.bias
        output = self._product(copy_to_region(x, self.group), weight, self.bias)
        return gather_channels(output, self.group) if self.style == "colwise_gather_output" else output

    def _product(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        if self.fp8 is None:
            return nn.functional.linear(x, weight, bias)
        return parallel_linear(x, weight, bias, fp8=self.fp8)


class ParallelEmbedding(nn.Module):
    """A table whose rows are split over ``group``; ids ``[...]`` -> ``[..., h]``."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.weight, self.padding_idx, self.group = embedding.weight, embedding.padding_idx, group
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Look up this rank's rows; the sum over the ranks completes the others."""
        found = vocab_parallel_lookup(ids, self.weight, self.group.rank() * len(self.weight), self.group.size())
        if self.padding_idx is not None:  # its row gets no gradient
            found = torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)
        return reduce_from_region(found, self.group)


def split_model(model: nn.Module, group: Group, *, plan: Plan | None = None) -> None:
    """Split ``model``, whole and equal on all ranks, over ``group`` in place.

    Errors: ``ConfigError`` for a plan that does not fit the model; ``LayoutError`` for sizes that do not divide.
    """
    _Splitting(model, group, plan).run()
    marked: Any = model
    marked.tensor_parallel_size = group.size()


def equalize_and_split(model: nn.Module, groups: ParallelGroups, seed: int) -> None:
    """Make the weights equal on all ranks, and split them unless ``parallelize`` has done both."""
    size, known = groups.size("tp"), getattr(model, "tensor_parallel_size", 1)
    if known not in (1, size):
        raise ConfigError(
            f"tensor_model_parallel_size={size}, but the model was given to parallelize(tensor={known}); use one value"
        )
    if known == 1:
        broadcast_from_first([*model.parameters(), *model.buffers()])
    if size > known:
        split_model(model, groups.group("tp"))
    if size > 1:  # dropout outside of split layers must be equal on the ranks of a tensor-parallel group
        torch.manual_seed(seed + groups.index("dp"))


def whole_tensor(parameter: nn.Parameter, group: Group) -> Tensor:
    """Return a copy of the whole parameter on the CPU, from the parts of all ranks of ``group``; a collective call."""
    spec = spec_of(parameter)
    if not spec.splits:
        return parameter.detach().to("cpu", copy=True)
    whole = torch.zeros(spec.global_shape, dtype=parameter.dtype, device=parameter.device)
    for part in spec.parts:
        if part.owned:
            whole[part.whole.index] = parameter.detach()[part.local.index]
    return reduce_from_region(whole, group).cpu()


def conv1d() -> tuple[type, ...]:
    """The Conv1D of transformers, if a model of this process can have one."""
    module = sys.modules.get("transformers.pytorch_utils")
    return (module.Conv1D,) if module is not None else ()


class _Splitting:
    def __init__(self, model: nn.Module, group: Group, plan: Plan | None) -> None:
        self.model, self.group, self.size, self.index = model, group, group.size(), group.rank()
        self.conv = conv1d()
        self.plan = plan_of(model, plan, (nn.Linear, *self.conv))
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.specs: dict[nn.Parameter, tuple[str, ShardSpec]] = {}
        self.replacements: dict[str, tuple[str, nn.Module]] = {}
        self.attention: dict[nn.Module, int] = {}
        """Attention modules, and the number of their key and value heads if ranks share these, else 0."""
        meta = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
        if meta is not None:
            raise ConfigError(f"tensor parallelism: {meta} is on the meta device; construct the model with memory")

    def run(self) -> None:
        """Choose the split of every parameter, check it, and apply it."""
        for name, (style, parts) in self.plan.items():
            module = self.modules.get(name)
            if module is None:
                self._parameter(name, style, parts)
            elif style == "moe_tp_experts":
                continue
            elif style == "replicated_with_grad_allreduce":
                for own, parameter in module.named_parameters():
                    self._record(f"{name}.{own}", parameter, self._whole(parameter, partial=True))
            elif style == "embedding_rowwise":
                self._embedding(name, module)
            else:
                self._linear(name, module, style, parts)
        self._check_tied()
        for parameter, (_, spec) in self.specs.items():
            local = parameter.new_empty(spec.local_shape)
            with torch.no_grad():
                spec.localise(parameter.detach(), local)
            parameter.data = local
        for parameter in self.model.parameters():
            spec = self.specs[parameter][1] if parameter in self.specs else self._whole(parameter)
            marked: Any = parameter
            marked.shard_spec = spec
        for name, (style, module) in self.replacements.items():
            owner, _, own = name.rpartition(".")
            setattr(self.modules[owner], own, self._parallel(style, module))
        for name, (style, _) in self.plan.items():
            if style == "moe_tp_experts":
                self.modules[name].register_forward_pre_hook(self._copy_inputs, with_kwargs=True)
                self.modules[name].register_forward_hook(self._sum_output)
        for module, shared in self.attention.items():
            self._divide_heads(module, shared)

    def _whole(self, parameter: nn.Parameter, *, partial: bool = False) -> ShardSpec:
        return replicated(tuple(parameter.shape), self.index, partial_grad=partial)

    def _record(self, name: str, parameter: nn.Parameter, spec: ShardSpec) -> None:
        other, known = self.specs.setdefault(parameter, (name, spec))
        if known != spec:
            raise ConfigError(f"plan: {name} and {other} are one tied parameter; split both in the same dim")

    def _split(self, name: str, parameter: Any, dim: int, parts: int) -> None:
        extent = parameter.shape[dim]
        if extent % (parts * self.size):
            raise LayoutError(
                f"{name}: dim {dim} of {tuple(parameter.shape)} cannot be split over tensor={self.size}"
                f"{f' in {parts} matrices' if parts > 1 else ''}; choose a divisor of {extent // parts}"
            )
        spec = split(tuple(parameter.shape), dim, self.index, self.size)
        if parts > 1:
            spec = split_fused(tuple(parameter.shape), (extent // parts,) * parts, self.index, self.size, dim=dim)
        self._record(name, parameter, spec)

    def _parameter(self, name: str, style: str, parts: int) -> None:
        """A parameter of a module of experts: ``[..., out, in]``."""
        parameter = self.model.get_parameter(name)
        if style not in ("colwise", "rowwise") or self.plan.get(name.rpartition(".")[0]) != ("moe_tp_experts", 1):
            raise ConfigError(
                f"plan: {name!r} is a parameter; only colwise, packed_colwise and rowwise parameters of a module with "
                "the style moe_tp_experts can be split; name the module instead"
            )
        dim = parameter.dim() - (2 if style == "colwise" else 1)
        self._split(name, parameter, dim, parts)

    def _embedding(self, name: str, module: Any) -> None:
        if type(module) is not nn.Embedding or module.max_norm is not None or module.scale_grad_by_freq:
            raise ConfigError(
                f"plan: {name!r} has the style embedding_rowwise; it must be an nn.Embedding without max_norm and "
                "scale_grad_by_freq; remove it from the plan"
            )
        if module.num_embeddings % self.size == 0:  # else every rank keeps the whole table
            self._split(f"{name}.weight", module.weight, 0, 1)
            self.replacements[name] = "embedding_rowwise", module

    def _linear(self, name: str, module: Any, style: str, parts: int) -> None:
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        if type(module) not in (nn.Linear, *self.conv) or hooks:
            raise ConfigError(
                f"plan: {name!r} ({type(module).__name__}) has the style {style!r}; it must be an nn.Linear without "
                "hooks; remove it from the plan, or its hooks"
            )
        out, into = (1, 0) if type(module) in self.conv else (0, 1)
        weight, bias = module.weight, module.bias
        if style == "colwise_gather_output" and weight.shape[out] % self.size:
            return  # every rank computes all outputs
        self.replacements[name] = style, module
        if style.startswith("rowwise"):
            self._split(f"{name}.weight", weight, into, 1)
            return
        owner = self.modules[name.rpartition(".")[0]]
        if style == "colwise" and (heads := _heads(owner, weight.shape[out], parts)):
            own = name.rpartition(".")[2]
            if heads % self.size and own in KEYS_AND_VALUES and self.size % heads == 0:
                self.attention[owner] = heads
                for suffix, parameter, dim in (("weight", weight, out), ("bias", bias, 0)):
                    if parameter is not None:
                        self._record(f"{name}.{suffix}", parameter, self._shared(parameter, dim, heads))
                return
            if heads % self.size:
                raise LayoutError(
                    f"{name}: {heads} attention heads cannot be split over tensor={self.size}; choose a divisor of "
                    f"{heads}{', or a multiple of it' if own in KEYS_AND_VALUES else ''}"
                )
            self.attention.setdefault(owner, 0)
        self._split(f"{name}.weight", weight, out, parts)
        if bias is not None:
            self._split(f"{name}.bias", bias, 0, parts)

    def _shared(self, parameter: nn.Parameter, dim: int, heads: int) -> ShardSpec:
        """One key or value head per rank, held by several ranks, each of which has a part of its gradient."""
        rows, sharers = parameter.shape[dim] // heads, self.size // heads
        ranges = tuple(((i // sharers * rows, (i // sharers + 1) * rows),) for i in range(self.size))
        return ShardSpec(tuple(parameter.shape), (Split(dim, "tp", ranges),), (("tp", self.index),))

    def _check_tied(self) -> None:
        for path, module in self.modules.items():
            for own, parameter in module._parameters.items():
                name = f"{path}.{own}".lstrip(".")
                known = None if parameter is None else self.specs.get(parameter)
                if known and known[1].splits and path not in self.replacements and name not in self.plan:
                    raise ConfigError(
                        f"plan: {name} is tied to {known[0]}, which is split; add {path!r} to the plan, or remove the "
                        "other"
                    )

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

    def _sum_output(self, _: nn.Module, args: Any, output: Tensor) -> Tensor:
        return reduce_from_region(output, self.group)

    def _divide_heads(self, module: nn.Module, shared: int) -> None:
        """Adjust the attributes of an attention module to this rank's heads."""
        values: Mapping[str, Any] = vars(module)
        for name in (*HEAD_COUNTS, *HEAD_WIDTHS):
            if isinstance(values.get(name), int):
                setattr(module, name, max(values[name] // self.size, 1))
        if shared and isinstance(values.get("num_key_value_groups"), int):
            module.num_key_value_groups = values["num_key_value_groups"] * shared // self.size


def _heads(owner: nn.Module, width: int, parts: int) -> int:
    """Number of heads in ``width`` outputs of an attention module, or 0 in other modules."""
    size = getattr(owner, "head_dim", None) or getattr(owner, "attention_head_size", None)
    return width // (parts * size) if isinstance(size, int) and size > 0 else 0
