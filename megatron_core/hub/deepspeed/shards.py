"""Whole float32 weights and optimizer state, from flat partitions or from the universal format."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.deepspeed.folder import ALLOWED, load_dict
from megatron_core.hub.megatron_lm.pickles import load_tensors

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
STEP = "step"
SETTINGS = ("lr", "weight_decay", "eps", "betas", "momentum")
"""Settings of a parameter group that a checkpoint passes on."""


def memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """A key that two living tensors share only if they have the same elements in the same memory.

    A transposed view, or a view with another dtype, can have the address and the shape of its base.
    """
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    # Strides of dimensions of size 1 are arbitrary.
    strides = tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    bits = tensor.is_conj(), tensor.is_neg()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), strides, bits


@dataclass(frozen=True)
class Stored:
    """A tensor of known shape that is assembled when it is read."""

    shape: Shape
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, tensor: Tensor) -> "Stored":
        """A tensor of a file; it is converted to float32 if it is a floating-point tensor."""
        tensor = tensor.detach()
        return cls(tuple(tensor.shape), lambda: tensor.float() if tensor.is_floating_point() else tensor)


@dataclass
class Parts:
    """The optimizer's weights and state by parameter."""

    main: dict[str, Stored] = field(default_factory=dict)
    """Float32 weights."""
    states: dict[str, dict[str, Stored]] = field(default_factory=dict)
    """Kind, such as exp_avg -> parameter -> state."""
    steps: set[int] = field(default_factory=set)
    """Numbers of steps of the optimizer; all parameters should have the same."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """Settings of the parameter groups."""


class Flat:
    """Flat tensors one after the other; only the parts that are asked for are copied."""

    def __init__(self, tensors: Sequence[Any], label: str) -> None:
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.dim() != 1 or not is_plain(tensor):
                raise CheckpointError(f"{label} is not a flat tensor of floating-point numbers")
        self._tensors = tensors
        self._ends = list(accumulate((tensor.numel() for tensor in tensors), initial=0))

    @property
    def numel(self) -> int:
        """Number of all elements."""
        return self._ends[-1]

    def span(self, start: int, stop: int) -> Tensor:
        """Return elements ``start ... stop - 1`` in float32."""
        pieces = [torch.empty(0)]
        for tensor, first in zip(self._tensors, self._ends, strict=False):
            local = slice(max(start - first, 0), max(min(stop - first, tensor.numel()), 0))
            if local.start < local.stop:
                pieces.append(tensor.detach()[local].float())
        return torch.cat(pieces)

    def stored(self, offset: int, shape: Shape) -> Stored:
        """The tensor of ``shape`` that begins at ``offset``."""
        return Stored(shape, lambda: self.span(offset, offset + prod(shape)).view(shape))


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is a dense floating-point tensor."""
    return tensor.layout is torch.strided and tensor.is_floating_point() and not tensor.is_quantized


def shape_of(value: Any, name: str) -> Shape:
    """A stored shape. Errors: ``CheckpointError`` for anything else."""
    if not isinstance(value, tuple | list) or not all(type(size) is int and 0 <= size < 2**48 for size in value):
        raise CheckpointError(f"the shape of {name} is {quoted(value)}; it must be a list of sizes")
    return tuple(value)


def shapes_of(groups: Any) -> list[dict[str, Shape]]:
    """The shapes of the trained parameters by group, in the order of the flat tensors."""
    if isinstance(groups, Mapping):
        groups = [groups]
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError("param_shapes is missing; it must list the parameters of the flat tensors")
    return [{str(name): shape_of(shape, str(name)) for name, shape in group.items()} for group in groups]


def read_partitions(ranks: Sequence[Mapping[str, Any]], shapes: list[dict[str, Shape]]) -> Parts:
    """Read the partitions of all data-parallel ranks; ``ranks``: their ``optimizer_state_dict``s.

    Errors: ``CheckpointError`` for another structure, or sizes that do not fit.
    """
    first = ranks[0]
    if "fp32_flat_groups" in first:
        return _read_stage3(ranks, shapes)
    if "single_partition_of_fp32_groups" in first:
        return _read_stage2(ranks, shapes)
    raise CheckpointError(
        "optimizer_state_dict has neither single_partition_of_fp32_groups (ZeRO 1 and 2) nor fp32_flat_groups (ZeRO "
        f"3), but {', '.join(map(str, first))[:200]}"
    )


def _listed(state: Mapping[str, Any], name: str, count: int | None = None) -> list[Any]:
    items = state.get(name)
    if not isinstance(items, list) or (count is not None and len(items) != count):
        length = f", of length {len(items)}" if isinstance(items, list) else ""
        raise CheckpointError(f"{name} is a {type(items).__name__}{length}; it must be a list of {count or 'tensors'}")
    return items


def _check_count(ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``CheckpointError`` unless each file says that there are as many partitions as files."""
    for rank, state in enumerate(ranks):
        counts = state.get("partition_count", len(ranks))
        for count in counts if isinstance(counts, list | tuple) else [counts]:
            if count != len(ranks):
                raise CheckpointError(
                    f"the file of data-parallel rank {rank} is of a run with {count} ranks, but there are files of "
                    f"{len(ranks)}: a file is missing, or files of two runs are mixed"
                )


def _read_stage2(ranks: Sequence[Mapping[str, Any]], shapes: list[dict[str, Shape]]) -> Parts:
    """ZeRO 1 and 2, and BF16_Optimizer: each rank has an equal range of the flat tensor of each group."""
    _check_count(ranks)
    count = len(shapes)
    weights = [_listed(state, "single_partition_of_fp32_groups", count) for state in ranks]
    bases = [_base_of(state.get("base_optimizer_state"), state) for state in ranks]
    result = Parts(groups=bases[0][1])
    for group, names in enumerate(shapes):
        paddings = [0] * len(names)
        if ranks[0].get("param_alignment_paddings") is not None:
            paddings = _paddings(ranks[0], group, count, len(names))
        kinds: dict[str, list[Any]] = {"fp32": [partitions[group] for partitions in weights]}
        states = [base[0].get(group, {}) for base in bases]
        kinds |= {state_kind: [state.get(state_kind) for state in states] for state_kind in kinds_of(states[0])}
        for state_kind, tensors in kinds.items():
            flat = Flat(tensors, f"{state_kind} of group {group}")
            target = result.main if state_kind == "fp32" else result.states.setdefault(state_kind, {})
            _cut(flat, names, paddings, len(ranks), target, f"{state_kind} of group {group}")
        result.steps |= {step for base, state in zip(bases, states, strict=True) for step in steps_of(state, base[2])}
    return result


def _paddings(state: Mapping[str, Any], group: int, groups: int, names: int) -> list[int]:
    """Elements between the parameters of a group."""
    paddings = _listed(state, "param_alignment_paddings", groups)[group]
    if (
        not isinstance(paddings, list)
        or len(paddings) != names
        or not all(type(n) is int and 0 <= n < 2**32 for n in paddings)
    ):
        raise CheckpointError(f"param_alignment_paddings of group {group} must list {names} numbers")
    return paddings


def _cut(flat: Flat, names: Shapes, paddings: Sequence[int], ranks: int, target: dict[str, Stored], label: str) -> None:
    """Find the parameters in the flat tensor of a group."""
    offset = 0
    for (name, shape), padding in zip(names.items(), paddings, strict=True):
        target[name] = flat.stored(offset, shape)
        offset += prod(shape) + padding
    if not 0 <= flat.numel - offset < 2 * ranks:  # the end is padded to a multiple of 2 * ranks
        raise CheckpointError(
            f"{label} has {flat.numel} elements in the files of {ranks} ranks, but its parameters have {offset}: a "
            "file is missing, or files of two runs are mixed"
        )


def _read_stage3(ranks: Sequence[Mapping[str, Any]], shapes: list[dict[str, Shape]]) -> Parts:
    """ZeRO 3: each rank has an equal part of each parameter."""
    _check_count(ranks)
    stored_groups = ranks[0].get("ds_zero_partition_groups")
    groups = stored_groups if isinstance(stored_groups, list) else []
    if any(isinstance(g, Mapping) and g.get("partition_count", len(ranks)) != len(ranks) for g in groups):
        raise CheckpointError("parameters are partitioned over groups of ranks (MiCS or experts), not supported")
    names = {name: shape for group in shapes for name, shape in group.items()}
    weights = [_listed(state, "fp32_flat_groups") for state in ranks]
    bases = [_base_of(state.get("optimizer_state_dict"), state) for state in ranks]
    result = Parts(groups=bases[0][1])
    count = len(weights[0])
    kinds: dict[str, list[list[Any]]] = {"fp32": weights}
    for state_kind in kinds_of(bases[0][0].get(0, {})):
        kinds[state_kind] = [[base[0].get(number, {}).get(state_kind) for number in range(count)] for base in bases]
    for state_kind, by_rank in kinds.items():
        flats = [Flat(tensors, state_kind) for tensors in by_rank]
        target = result.main if state_kind == "fp32" else result.states.setdefault(state_kind, {})
        offset = 0
        for name, shape in names.items():
            length = -(-prod(shape) // len(ranks))
            target[name] = _gathered(flats, offset, length, shape)
            offset += length
        for rank, flat in enumerate(flats):
            if flat.numel != offset:
                raise CheckpointError(
                    f"{state_kind} of data-parallel rank {rank} has {flat.numel} elements, but its parts of the "
                    f"parameters have {offset}: files of two runs are mixed"
                )
    for states, _, fallback in bases:
        result.steps |= {step for number in range(count) for step in steps_of(states.get(number, {}), fallback)}
    return result


def _gathered(flats: Sequence[Flat], offset: int, length: int, shape: Shape) -> Stored:
    def read() -> Tensor:
        return torch.cat([flat.span(offset, offset + length) for flat in flats])[: prod(shape)].view(shape)

    return Stored(shape, read)


def _base_of(
    base: Any, state: Mapping[str, Any]
) -> tuple[dict[int, Mapping[str, Any]], list[dict[str, Any]], int | None]:
    """The inner optimizer: state by number of its flat tensor, settings of its groups, and its step if it has one."""
    if isinstance(base, list):  # an elastic checkpoint lists the state of each group
        states = {number: group_state for number, group_state in enumerate(base) if isinstance(group_state, Mapping)}
        return states, [], whole_number(state.get("base_optimizer_state_step"))
    if not isinstance(base, Mapping) or not isinstance(base.get("state"), Mapping):
        raise CheckpointError(f"the optimizer's state is a {type(base).__name__}; it must be a dict with a dict state")
    groups = base.get("param_groups")
    groups = (
        [group_state for group_state in groups if isinstance(group_state, Mapping)] if isinstance(groups, list) else []
    )
    fallback = whole_number(groups[0].get(STEP)) if groups else None
    settings = [{name: group_state[name] for name in SETTINGS if name in group_state} for group_state in groups]
    return (
        {n: group_state for n, group_state in base["state"].items() if isinstance(group_state, Mapping)},
        settings,
        fallback,
    )


def kinds_of(state: Mapping[str, Any]) -> list[str]:
    """The kinds of state with an element for each weight."""
    return [str(name) for name, value in state.items() if isinstance(value, Tensor) and value.dim() and name != STEP]


def steps_of(state: Mapping[str, Any], fallback: int | None) -> Iterable[int]:
    """The number of steps of one state, if it is known."""
    step = whole_number(state.get(STEP))
    step = fallback if step is None else step
    return [] if step is None else [step]


def whole_number(value: Any) -> int | None:
    """A count stored as a number or a tensor; None for anything else."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 and value.layout is torch.strided else None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return int(value) if 0 <= value < 2**48 and value == int(value) else None


WEIGHT = "fp32"
STATE = "optimizer_state.pt"


def read_universal(folder: Path, shapes: Mapping[str, Shape]) -> tuple[Parts, dict[str, Stored], Mapping[str, Any]]:
    """Read all tensors below ``folder``; return trained parameters, others, and the content of ``optimizer_state.pt``.

    ``shapes``: shapes of the trained parameters, for files with flat tensors. Errors: ``CheckpointError``.
    """
    common = load_dict(folder / STATE)
    trained = Parts()
    untrained: dict[str, Stored] = {}
    steps: set[int] = set()
    for name in shapes:
        path = folder / name
        if "/" in name or name in (".", "..") or not (path / f"{WEIGHT}.pt").is_file():
            raise CheckpointError(f"{folder} has no {name[:100]}/{WEIGHT}.pt; copy the whole checkpoint again")
    for path in sorted(folder.iterdir()):
        for file in sorted(path.glob("*.pt")) if path.is_dir() else ():
            content = load_tensors(file, ALLOWED)
            value = content.get("param") if isinstance(content, dict) else content
            if file.stem == "step":
                step = whole_number(value)
                steps |= set() if step is None else {step}
                continue
            stored = _stored(file, value, None if isinstance(content, dict) else shapes.get(path.name))
            weights = (
                trained.main if path.name in shapes else untrained
            )  # others: frozen parameters, buffers, second names
            target = weights if file.stem == WEIGHT else trained.states.setdefault(file.stem, {})
            target[path.name] = stored
    inner = common.get("optimizer_state_dict")
    if not steps and isinstance(inner, Mapping) and isinstance(inner.get("state"), Mapping):
        states = [entry for entry in inner["state"].values() if isinstance(entry, Mapping)]
        steps = {step for state in states for step in steps_of(state, None)}
    trained.steps = steps
    groups = common.get("param_groups")
    trained.groups = [dict(entry) for entry in groups if isinstance(entry, Mapping)] if isinstance(groups, list) else []
    return trained, untrained, common


def _stored(file: Path, value: Any, shape: Shape | None) -> Stored:
    if not isinstance(value, Tensor) or not is_plain(value):
        raise CheckpointError(f"{file} contains a {type(value).__name__}; it must contain a tensor of numbers")
    shape = tuple(value.shape) if shape is None or value.dim() > 1 else shape
    if prod(shape) != value.numel():
        raise CheckpointError(f"{file} has {value.numel()} elements, but the parameter has the shape {list(shape)}")
    tensor = value.detach()
    return Stored(shape, lambda: tensor.float().reshape(shape))
