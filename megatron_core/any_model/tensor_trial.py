"""Runs of a part of a model, whole and split, with the same weights and inputs, and their comparison."""

import copy
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from megatron_core.any_model.tensor_heads import Attributes
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_reduce_, gather_channels, scatter_channels
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import ShardSpec
from megatron_core.parallel.texts import listed

BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.15}
"""Relative error up to which results are equal; a wrong number of heads changes some gradient by a factor. Modules of
transformers compute parts of a float64 model in float32."""
FLOOR = 0.01
"""A gradient below this share of the largest one, such as that of a bias of keys, consists of rounding errors."""
PARTIAL = (
    "each rank has a part of it, and their sum is missing; give it, or its module, the style "
    "replicated_with_grad_allreduce"
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Region:
    """Modules of a model with the same structure, and a copy of the first one before it was split."""

    names: list[str]
    references: list[weakref.ref[nn.Module]]
    """The modules, of which a pipeline drops those of other stages."""
    twin: nn.Module
    """The copy, whose parameters have no memory."""
    specs: dict[str, ShardSpec]
    """How each parameter is split, by its name inside of the module."""
    install: Callable[[nn.Module], None]
    """Replaces the layers of a copy, whose parameters are local, by parallel ones."""
    ways: list[tuple[str, Attributes]]
    is_vouched: bool
    """Whether the caller gave the number of heads, so that a module that cannot run alone is accepted."""
    hooks: list[RemovableHandle] = field(default_factory=list)

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of this rank."""
        return [module for reference in self.references if (module := reference()) is not None]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The present dtype of each parameter; of a weight that has been quantized since, that of the others."""
        present = {name: parameter.dtype for name, parameter in self.modules[0].named_parameters()}
        other = next((dtype for dtype in present.values() if dtype.is_floating_point), torch.float32)
        return {name: present.get(name, other) for name, _ in self.twin.named_parameters()}

    @property
    def device(self) -> torch.device:
        """The present device of the parameters."""
        return next(self.modules[0].parameters()).device

    @property
    def widths(self) -> set[int]:
        """Extents of the matrices, among which is the width of the hidden states."""
        return {extent for parameter in self.twin.parameters() if parameter.dim() == 2 for extent in parameter.shape}

    def adjust(self, module: nn.Module, attributes: Attributes) -> None:
        """Set the values of ``attributes``, and those of the twin for all others."""
        every = {key for _, choice in self.ways for key in choice}
        for path, name in every:
            value = attributes.get((path, name), getattr(self.twin.get_submodule(path), name))
            setattr(module.get_submodule(path), name, value)


@dataclass
class TrialResults:
    """Outputs and gradients of a run."""

    outputs: list[Tensor]
    gathered: dict[int, int]
    """Numbers of outputs (of all leaves) with this rank's heads alone, such as attention weights, and their dim."""
    inputs: list[Tensor]
    """Gradients of the inputs."""
    parameters: dict[str, Tensor]
    """Gradients of the parameters."""

    @property
    def bound(self) -> float:
        """The relative error up to which other results are equal to these."""
        return max(BOUNDS.get(tensor.dtype, 0.0) for tensor in (*self.outputs, *self.parameters.values()))


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose parameters have no memory.

    Errors: ``ConfigError`` if the module has attributes that cannot be copied.
    """
    return _copy(module, {p: torch.empty_like(p, device="meta") for p in module.parameters()})


def _copy(module: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> nn.Module:
    """Copy ``module`` with these values of its parameters."""
    memo: dict[int, Any] = {id(p): nn.Parameter(v, requires_grad=p.requires_grad) for p, v in values.items()}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConfigError(
            f"tensor parallelism: {type(module).__name__} cannot be copied, so its split cannot be checked "
            f"({type(error).__name__}: {error}); remove the attribute that copy.deepcopy refuses"
        ) from error


def run_trial(
    region: Region,
    inputs: Arguments,
    weights: dict[str, Tensor],
    attributes: Attributes | None,
    reference: TrialResults | None = None,
    group: Group | None = None,
) -> TrialResults | str:
    """Run forward and backward of a copy, or with ``attributes`` of a split copy; return a text if it fails.

    ``reference``: the results that those of a split copy should have.
    """
    values = weights
    if attributes is not None:
        values = {name: _local(weight, region.specs[name]) for name, weight in weights.items()}
    module = _copy(region.twin, {parameter: values[name] for name, parameter in region.twin.named_parameters()})
    for name, buffer in region.modules[0].named_buffers():  # with their present dtype and device
        path, _, label = name.rpartition(".")
        module.get_submodule(path)._buffers[label] = buffer.detach().clone()
    leaves = {name: p.requires_grad_() for name, p in module.named_parameters() if p.is_floating_point()}
    if attributes is not None:
        region.adjust(module, attributes)
        region.install(module)
    module.eval()
    args, kwargs = (_detached(argument, region.widths) for argument in inputs)
    needed = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor) and leaf.requires_grad]
    try:
        leaves_out = tree_flatten(module(*args, **kwargs))[0]
        gathered: dict[int, int] = {}
        if reference is not None and group is not None:
            gathered = _split_dims(leaves_out, reference.outputs, group.size())
            leaves_out = _gathered(leaves_out, gathered, group)
        outputs = [tensor for tensor in leaves_out if is_float(tensor)]
        trained = [tensor for tensor in outputs if tensor.requires_grad]
        if not trained or not all(tensor.isfinite().all() for tensor in outputs):
            return "its outputs are not finite tensors with gradients"
        total = torch.stack([(tensor * _noise(tensor)).sum().double() for tensor in trained]).sum()
        results = torch.autograd.grad(total, [*needed, *leaves.values()], allow_unused=True)
    except Exception as error:  # the caller's code may raise anything
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip([*needed, *leaves.values()], results, strict=True)]
    gradients = dict(zip(leaves, grads[len(needed) :], strict=True))
    return TrialResults([tensor.detach() for tensor in outputs], gathered, grads[: len(needed)], gradients)


def output_fault(reference: TrialResults, split: TrialResults) -> str:
    """Return the first output, or gradient of an input, that differs, or an empty text."""
    if len(reference.outputs) != len(split.outputs):
        return f"{len(split.outputs)} outputs instead of {len(reference.outputs)}"
    for number, (right, value) in enumerate(zip(reference.outputs, split.outputs, strict=True)):
        if right.shape != value.shape:
            return f"output {number} has the shape {tuple(value.shape)} instead of {tuple(right.shape)}"
        error = _error(value, right, 0.0)
        if not error < reference.bound:
            return f"output {number} is off by {error:.1e}"
    for number, (right, value) in enumerate(zip(reference.inputs, split.inputs, strict=True)):
        error = _error(value, right, 0.0)
        if not error < reference.bound:
            return f"the gradient of input {number} is off by {error:.1e}"
    return ""


def gradient_faults(region: Region, reference: TrialResults, split: TrialResults, group: Group) -> str:
    """Return the first gradient of a parameter that differs, or an empty text; a collective call."""
    floor = FLOOR * max((float(gradient.double().norm()) for gradient in reference.parameters.values()), default=0.0)
    faults = [
        _gradient_fault(region.specs[name], split.parameters[name], gradient, group, reference.bound, floor)
        for name, gradient in reference.parameters.items()
    ]  # all of them, because each is a collective call
    named = zip(reference.parameters, faults, strict=True)
    return next((f"the gradient of {name} {fault}" for name, fault in named if fault), "")


def _gradient_fault(spec: ShardSpec, local: Tensor, reference: Tensor, group: Group, bound: float, floor: float) -> str:
    """Compare the gradient of a parameter with that of the whole module; a collective call."""
    placed = torch.zeros_like(reference, memory_format=torch.contiguous_format)  # gradients of convolutions are not
    for piece in spec.parts:
        placed[piece.whole.index] = local[piece.local.index]
    total = placed.clone()
    all_reduce_(total, group)
    summed = bool(spec.splits or spec.partial_axes)
    error = _error(total if summed else placed, reference, floor)
    if error < bound:
        return ""
    reason = ""
    if not summed and _error(total, reference, floor) < bound:
        reason = f": {PARTIAL}"
    return f"is off by {error:.1e}{reason}"


def _error(value: Tensor, expected: Tensor, floor: float) -> float:
    norm = max(float(expected.double().norm()), floor, 1e-30)
    return float((value.double() - expected.double()).norm()) / norm


def _split_dims(leaves: list[Any], expected: list[Tensor], size: int) -> dict[int, int]:
    """Return the numbers of outputs that are split over the ranks, and their dim: those with an entry for each head."""
    floats = [number for number, leaf in enumerate(leaves) if is_float(leaf)]
    dims: dict[int, int] = {}
    for number, right in zip(floats, expected, strict=False):
        local = leaves[number]
        different = [d for d in range(right.dim()) if right.dim() == local.dim() and right.shape[d] != local.shape[d]]
        if len(different) == 1 and right.shape[different[0]] == local.shape[different[0]] * size:
            dims[number] = different[0]
    return dims


def _gathered(leaves: list[Any], dims: Mapping[int, int], group: Group) -> list[Any]:
    """Return outputs with the heads of all ranks."""
    outputs = list(leaves)
    for number, dim in dims.items():
        outputs[number] = gather_channels(leaves[number].movedim(dim, -1).contiguous(), group).movedim(-1, dim)
    return outputs


def gather_outputs(dims: Mapping[int, int], group: Group, module: nn.Module, args: Any, output: Any) -> Any:
    """Replace the outputs of a split module that have this rank's heads alone."""
    leaves, structure = tree_flatten(output)
    # Attention of context-parallel ranks returns None in place of its weights, which the whole module returned.
    dims = {number: dim for number, dim in dims.items() if number >= len(leaves) or leaves[number] is not None}
    if any(number >= len(leaves) or not is_float(leaves[number]) for number in dims):
        raise ConfigError(
            f"{type(module).__name__} returns other outputs than when its split was checked, when outputs "
            f"{listed([*dims])} had an entry for each head; return the same outputs in each forward"
        )
    return tree_unflatten(_gathered(leaves, dims, group), structure)


def split_masks(heads: int, group: Group, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Give a split module this rank's part of a mask or bias (batch, heads, queries, keys), as BEiT passes to it."""
    named = {name: value for name, value in kwargs.items() if "mask" in name or "bias" in name}
    masks = {name: mask for name, mask in named.items() if is_float(mask) and mask.dim() == 4}
    masks = {name: mask for name, mask in masks.items() if mask.shape[1] == heads}
    of_rank = {name: scatter_channels(mask.movedim(1, -1), group).movedim(-1, 1) for name, mask in masks.items()}
    return args, {**kwargs, **of_rank}


def _local(weight: Tensor, spec: ShardSpec) -> Tensor:
    local = weight.new_empty(spec.local_shape)
    spec.localise(weight, local)
    return local


class _DetachedCopies(TorchFunctionMode):
    """Lets ``copy.deepcopy`` copy the tensors of objects (key-value caches) without their history."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _detached(value: Any, widths: set[int]) -> Any:
    """Copy inputs, so that a run neither changes them nor reaches their history.

    Those of one of ``widths`` get noise: equal or zero hidden states would hide a wrong number of heads.
    """
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        if is_float(value) and value.dim() > 1 and value.shape[-1] in widths:
            copied += _noise(copied)
        return copied.requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_detached(inner, widths) for inner in value)
    if type(value) is dict:
        return {name: _detached(inner, widths) for name, inner in value.items()}
    with _DetachedCopies():
        return copy.deepcopy(value)


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(2)).to(like)


def is_float(value: Any) -> bool:
    """Whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
