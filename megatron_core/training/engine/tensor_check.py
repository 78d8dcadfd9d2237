"""Proof that a split part of a model computes what the whole part computes.

The forward of a caller's module may read numbers of heads and widths from anywhere. So each kind of split region (a
module that contains column-parallel layers and the row-parallel ones after them) is run twice, whole and split, with
random weights and the same inputs, and outputs and all gradients are compared. The inputs are random if ``forward``
takes one tensor, else those of the first forward. The copies are dropped afterwards.
"""

import copy
import inspect
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten
from torch.utils.hooks import RemovableHandle

from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import ShardSpec
from megatron_core.parallel.texts import gather_strings, listed
from megatron_core.training.engine.tensor_heads import Attributes, integers_of

BOUNDS = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.15}
"""Relative error up to which results are equal; a wrong number of heads changes some gradient by a factor. Modules of
transformers compute parts of a float64 model in float32."""
FLOOR = 0.01
"""A gradient below this share of the largest one, such as that of a bias of keys, consists of rounding errors."""
PARTIAL = (
    "each rank has a part of it, and their sum is missing; give its module the style replicated_with_grad_allreduce"
)
SYNTHETIC = (2, 5)
"""Batch and length of random inputs."""

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
        """The present dtype of each parameter."""
        return {name: parameter.dtype for name, parameter in self.modules[0].named_parameters()}

    @property
    def device(self) -> torch.device:
        """The present device of the parameters."""
        return next(self.modules[0].parameters()).device

    def adjust(self, module: nn.Module, attributes: Attributes) -> None:
        """Set the values of ``attributes``, and those of the twin for all others."""
        every = {key for _, way in self.ways for key in way}
        for path, name in every:
            value = attributes.get((path, name), getattr(self.twin.get_submodule(path), name))
            setattr(module.get_submodule(path), name, value)


def twin_of(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose parameters have no memory.

    Errors: ``ConfigError`` if the module has attributes that cannot be copied.
    """
    return _copy(module, {p: torch.empty_like(p, device="meta") for p in module.parameters()})


def establish(region: Region, group: Group) -> None:
    """Adjust the modules of ``region`` to this rank's heads, now or in their first forward.

    Errors: ``ConfigError`` if no adjustment makes the split module compute what the whole one does.
    """
    for module in region.modules:
        region.adjust(module, region.ways[0][1])
    # A synthetic check finds most faults before training, and costs nothing in the first step.
    inputs = _random_inputs(region)
    if inputs is not None and _settle(region, group, inputs, is_real=False):
        return

    @torch._dynamo.disable
    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch.inference_mode(mode=False):
            _settle(region, group, (args, kwargs), is_real=True)
        for hook in region.hooks:
            hook.remove()

    region.hooks += [each.register_forward_pre_hook(check, with_kwargs=True) for each in region.modules]


def _settle(region: Region, group: Group, inputs: Arguments, *, is_real: bool) -> bool:
    """Choose the first adjustment that is right; return False if random inputs do not fit the module."""
    if is_real:
        _check_same_inputs(region, inputs, group)
    with _undisturbed(region.device):
        weights = _weights(region)
        whole = _run(region, inputs, weights, None)
        reason = _agreed(whole if isinstance(whole, str) else "", group, region)
        if reason and is_real and not region.is_vouched:
            raise ConfigError(
                f"{_named(region)} cannot run alone, so its split over {group.size()} tensor-parallel ranks cannot be "
                f"checked ({reason}); give heads= to megatron_core.parallelize, or leave it whole with plan="
            )
        if reason or isinstance(whole, str):
            return is_real
        faults: list[str] = []
        for sentence, attributes in region.ways:
            split = _run(region, inputs, weights, attributes)
            fault = _agreed(split if isinstance(split, str) else _output_fault(whole, split, group), group, region)
            if not fault and not isinstance(split, str):
                fault = _agreed(_gradient_faults(region, whole, split, group), group, region)
            if not fault:
                for module in region.modules:
                    region.adjust(module, attributes)
                return True
            faults.append(f"{sentence}: {fault}")
    if not is_real and len(inputs[0]) > 1:  # random masks or states may not be inputs that the module is made for
        return False
    raise ConfigError(_refusal(region, group.size(), faults))


def _check_same_inputs(region: Region, inputs: Arguments, group: Group) -> None:
    """ConfigError if the ranks call a module with different values; a collective call."""
    tensors = [each.detach() for each in tree_flatten(inputs)[0] if _is_float(each)]
    sums = [float(each.double().abs().sum()) for each in tensors]
    by_rank = [json.loads(text) for text in gather_strings(json.dumps(sums), group, region.device)]
    bound = max((BOUNDS.get(each.dtype, 0.0) for each in tensors), default=0.0)
    for rank, others in enumerate(by_rank):
        if not np.allclose(others, by_rank[0], rtol=bound, equal_nan=True):
            raise ConfigError(
                f"{_named(region)}: its inputs differ between the tensor-parallel ranks 0 and {rank}; the modules "
                "before it must compute the same on every rank, so give every rank of a group the same samples, and "
                "the modules before it a style that joins their outputs"
            )


def _refusal(region: Region, size: int, faults: list[str]) -> str:
    """Return the reason and the fix of a region that cannot be split."""
    start = (
        f"{_named(region)}, split over {size} tensor-parallel ranks, does not compute what the whole module computes"
    )
    partial = next((fault for fault in faults if PARTIAL in fault), None)
    if partial is not None:
        return f"{start} ({partial})"
    parts = [module for module in region.twin.modules() if not type(module).__module__.startswith("torch.nn")]
    integers = dict.fromkeys(name for module in parts for name in integers_of(module))
    return (
        f"{start} ({'; '.join(faults[:2])}); give megatron_core.parallelize heads= with its number of heads, or the "
        f"names of its attributes that hold numbers of heads (its integers are {listed([*integers], 12) or 'none'}), "
        "and let forward read sizes from these attributes or from tensors; or correct its styles with plan=, or "
        "leave it whole"
    )


@dataclass
class _Results:
    outputs: list[Tensor]
    inputs: list[Tensor]
    """Gradients of the inputs."""
    parameters: dict[str, Tensor]
    """Gradients of the parameters."""

    @property
    def bound(self) -> float:
        """The relative error up to which other results are equal to these."""
        return max(BOUNDS.get(each.dtype, 0.0) for each in (*self.outputs, *self.parameters.values()))


def _run(
    region: Region, inputs: Arguments, weights: dict[str, Tensor], attributes: Attributes | None
) -> _Results | str:
    """Run forward and backward of a copy, whole or with ``attributes`` split; return a text if it fails."""
    values = weights
    if attributes is not None:
        values = {name: _local(weight, region.specs[name]) for name, weight in weights.items()}
    module = _copy(region.twin, {parameter: values[name] for name, parameter in region.twin.named_parameters()})
    for name, buffer in region.modules[0].named_buffers():  # with their present dtype and device
        path, _, own = name.rpartition(".")
        module.get_submodule(path)._buffers[own] = buffer.detach().clone()
    leaves = {name: parameter.requires_grad_() for name, parameter in module.named_parameters()}
    if attributes is not None:
        region.adjust(module, attributes)
        region.install(module)
    module.eval()
    args, kwargs = _detached(inputs[0]), _detached(inputs[1])
    needed = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor) and each.requires_grad]
    try:
        outputs = [each for each in tree_flatten(module.forward(*args, **kwargs))[0] if _is_float(each)]
        trained = [each for each in outputs if each.requires_grad]
        if not trained or not all(each.isfinite().all() for each in outputs):
            return "its outputs are not finite tensors with gradients"
        total = (trained[0] * _noise(trained[0])).sum()
        found = torch.autograd.grad(total, [*needed, *leaves.values()], allow_unused=True)
    except Exception as error:  # the caller's code may raise anything
        return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip([*needed, *leaves.values()], found, strict=True)]
    gradients = dict(zip(leaves, grads[len(needed) :], strict=True))
    return _Results([each.detach() for each in outputs], grads[: len(needed)], gradients)


def _output_fault(whole: _Results, split: _Results, group: Group) -> str:
    """Return the first output, or gradient of an input, that differs, or an empty text."""
    if len(whole.outputs) != len(split.outputs):
        return f"{len(split.outputs)} outputs instead of {len(whole.outputs)}"
    for number, (right, value) in enumerate(zip(whole.outputs, split.outputs, strict=True)):
        expected = right if right.shape == value.shape else _share(right, value, group)
        if expected is None or (number == 0 and right.shape != value.shape):
            return f"output {number} has the shape {tuple(value.shape)} instead of {tuple(right.shape)}"
        error = _error(value, expected, 0.0)
        if not error < whole.bound:
            return f"output {number} is off by {error:.1e}"
    for number, (right, value) in enumerate(zip(whole.inputs, split.inputs, strict=True)):
        error = _error(value, right, 0.0)
        if not error < whole.bound:
            return f"the gradient of input {number} is off by {error:.1e}"
    return ""


def _gradient_faults(region: Region, whole: _Results, split: _Results, group: Group) -> str:
    """Return the first gradient of a parameter that differs, or an empty text; a collective call."""
    floor = FLOOR * max((float(each.double().norm()) for each in whole.parameters.values()), default=0.0)
    faults = [
        _gradient_fault(region.specs[name], split.parameters[name], gradient, group, whole.bound, floor)
        for name, gradient in whole.parameters.items()
    ]  # all of them, because each is a collective call
    named = zip(whole.parameters, faults, strict=True)
    return next((f"the gradient of {name} {fault}" for name, fault in named if fault), "")


def _gradient_fault(spec: ShardSpec, local: Tensor, whole: Tensor, group: Group, bound: float, floor: float) -> str:
    """Compare the gradient of a parameter with that of the whole module; a collective call."""
    placed = torch.zeros_like(whole)
    for part in spec.parts:
        placed[part.whole.index] = local[part.local.index]
    total = placed.clone()
    all_reduce_(total, group)
    summed = bool(spec.splits or spec.partial_axes)
    error = _error(total if summed else placed, whole, floor)
    if error < bound:
        return ""
    reason = ""
    if not summed and _error(total, whole, floor) < bound:
        reason = f": {PARTIAL}"
    return f"is off by {error:.1e}{reason}"


def _error(value: Tensor, expected: Tensor, floor: float) -> float:
    norm = max(float(expected.double().norm()), floor, 1e-30)
    return float((value.double() - expected.double()).norm()) / norm


def _share(whole: Tensor, local: Tensor, group: Group) -> Tensor | None:
    """Return this rank's part of an output with one entry for each head, such as attention weights."""
    dims = [d for d in range(whole.dim()) if whole.dim() == local.dim() and whole.shape[d] != local.shape[d]]
    if len(dims) != 1 or whole.shape[dims[0]] != local.shape[dims[0]] * group.size():
        return None
    return whole.chunk(group.size(), dims[0])[group.rank()]


def _agreed(text: str, group: Group, region: Region) -> str:
    """Return the first text that is not empty of any rank; a collective call."""
    return next((each for each in gather_strings(text, group, region.device) if each), "")


def _weights(region: Region) -> dict[str, Tensor]:
    """Return random weights, equal on all ranks, so that rows and columns are of size 1 and vectors near 1."""
    generator = torch.Generator().manual_seed(0)
    dtypes, weights = region.dtypes, {}
    for name, parameter in region.twin.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        values = values / max(parameter.shape[-1], 1) ** 0.5 if parameter.dim() > 1 else 1.0 + 0.2 * values
        weights[name] = values.to(region.device, dtypes[name])
    return weights


def _local(weight: Tensor, spec: ShardSpec) -> Tensor:
    local = weight.new_empty(spec.local_shape)
    spec.localise(weight, local)
    return local


def _random_inputs(region: Region) -> Arguments | None:
    """Return random inputs for a ``forward`` that takes tensors of the width of the first split layer, or None."""
    twin = region.twin
    parameters = inspect.signature(twin.forward).parameters.values()
    required = [each for each in parameters if each.default is each.empty]
    required = [each for each in required if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if not required or len(required) > 3 or any(each.kind is each.KEYWORD_ONLY for each in required):
        return None
    widths = [getattr(each, "in_features", None) for each in twin.modules()]
    width = next((each for each in widths if isinstance(each, int)), None)
    if width is None:
        return None
    generator = torch.Generator().manual_seed(1)
    dtype = next((each for each in region.dtypes.values() if each.is_floating_point), torch.float32)
    values = [torch.randn(*SYNTHETIC, width, generator=generator) for _ in required]
    return tuple(each.to(region.device, dtype).requires_grad_() for each in values), {}


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Return a context that keeps generators, and has gradients without the hooks of the caller's saved tensors."""
    devices = [device] if device.type == "cuda" else []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), hooks:
        yield


class _DetachedCopies(TorchFunctionMode):
    """Lets ``copy.deepcopy`` copy the tensors of objects (key-value caches) without their history."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def _detached(value: Any) -> Any:
    """Copy inputs, so that a run neither changes them nor reaches their history."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(_detached(each) for each in value)
    if type(value) is dict:
        return {name: _detached(each) for name, each in value.items()}
    with _DetachedCopies():
        return copy.deepcopy(value)


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


def _noise(like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(2)).to(like)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _named(region: Region) -> str:
    return f"{region.names[0] or 'the model'} ({type(region.twin).__name__})"
