"""Any ``torch.optim.Optimizer`` on this rank's main weights."""

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from megatron_core.any_model.scheduler import is_json
from megatron_core.checkpoint import Box, TensorBox, pieces_of
from megatron_core.config.optimizers import OptimizerKind, optimizer_kinds
from megatron_core.data_parallel import Bucket
from megatron_core.errors import ConfigError
from megatron_core.optimizer.algorithms import register_optimizer
from megatron_core.optimizer.rule import Algorithm
from megatron_core.optimizer.shard import Shard
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.sharding import spec_of

Coupling = Literal["none", "parameter", "model"]
"""Elements on which the update of an element depends: only itself, its parameter, or the model."""
SHAPES = ((160, 130), (7, 5))
CUT = 7777
STEPS = 3
"""Tensors of the comparison in ``coupling_of``, larger than the usual thresholds of factored and blockwise state."""

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of torch's optimizers with the functions that ``step`` calls."""


def register_class(optimizer: torch.optim.Optimizer) -> str:
    """Add the optimizer's class to the table of optimizers; return its name there."""
    name = f"torch {type(optimizer).__name__}"
    if name not in optimizer_kinds():
        register_optimizer(OptimizerKind(name=name, all_moments=()), Algorithm)
    return name


def coupling_of(optimizer: torch.optim.Optimizer) -> Coupling:
    """Compare steps on whole tensors with steps on their parts, with the optimizer's settings, in float64.

    An optimizer that raises an exception here, draws random numbers or changes nothing counts as ``model``.
    """
    generator = torch.Generator().manual_seed(0)
    draws = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1 + STEPS)] for shape in SHAPES
    ]
    for group in optimizer.param_groups:
        try:
            with torch.random.fork_rng(devices=[]):
                first, second = _trial(optimizer, group, draws)
                (alone,) = _trial(optimizer, group, draws[:1])
                (other,) = _trial(optimizer, group, draws[1:])
                changes = [_trial(optimizer, group, [[x.flatten()[half] for x in draws[0]]])[0] for half in _halves()]
        except Exception:
            return "model"
        if not first.any() or not _equal(first, alone) or not _equal(second, other):
            return "model"
        if not _equal(first.flatten(), torch.cat(changes)):
            return "parameter"
    return "none"


def _halves() -> tuple[slice, slice]:
    return slice(0, CUT), slice(CUT, None)


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-9 * a.abs().max())


def _trial(optimizer: torch.optim.Optimizer, group: dict[str, Any], draws: list[list[Tensor]]) -> list[Tensor]:
    """Return the changes of tensors by a few steps of a copy of ``optimizer``; draws: weights, then gradients."""
    trial = object.__new__(type(optimizer))
    attributes = {n: v for n, v in vars(optimizer).items() if n not in ("state", "param_groups", "step", *STEP_HOOKS)}
    vars(trial).update(deepcopy(attributes), **{name: OrderedDict() for name in STEP_HOOKS})
    params = [nn.Parameter(weights.clone()) for weights, *_ in draws]
    settings = {name: deepcopy(value) for name, value in group.items() if name != "params"}
    if settings.get("lr") is not None:
        settings["lr"] = 1e-2  # a schedule may begin with 0, which would hide everything
    vars(trial).update(state=defaultdict(dict), param_groups=[{**settings, "params": params}])
    for parameter, first in product(params, group["params"][:1]):  # a group may have no parameters
        for name, value in optimizer.state.get(first, {}).items():
            like = isinstance(value, Tensor) and value.shape == first.shape
            trial.state[parameter][name] = (
                torch.full_like(parameter, value.flatten()[0].item()) if like else deepcopy(value)
            )
    for step in range(1, 1 + STEPS):
        for parameter, drawn in zip(params, draws, strict=True):
            parameter.grad = drawn[step].clone()
        type(optimizer).step(trial)
    return [parameter.detach() - weights for parameter, (weights, *_) in zip(params, draws, strict=True)]


class FillsBoxes(Protocol):
    """A reader of checkpoints."""

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of each piece."""


@dataclass(frozen=True, eq=False)
class ShardPiece:
    """The part of a parameter in this rank's shard: whole, in its shape, or a flat range."""

    shard: Shard
    name: str
    source: nn.Parameter
    at: int
    """Offset in the shard."""
    weights: nn.Parameter
    """A view of the main weights; the caller's optimizer updates it."""

    @property
    def span(self) -> slice:
        """Elements of the shard."""
        return slice(self.at, self.at + self.weights.numel())


class TorchOptimizer(Optimizer):
    """Updates main weights by a torch optimizer of the caller, which keeps its own state.

    Gradients are clipped and without the loss scale. The groups of ``caller`` and ``param_groups`` are the same
    objects. Optimizers whose ``coupling_of`` is not ``none`` need whole parameters in shards.
    """

    updates_on_host = False

    def __init__(self, caller: torch.optim.Optimizer, *args: Any, param_groups: Sequence[dict[str, Any]]) -> None:
        super().__init__(*args, param_groups=param_groups)
        self.caller = caller
        for shard in self.shards:
            if shard.is_rounded or shard.needs_transfer:
                raise ConfigError(
                    f"optimizer={type(caller).__name__} of torch needs weights in memory in float32; remove "
                    "optimizer_offload_dir, zero3_param_offload_dir, zero3_param_cpu_offload and main_params_dtype"
                )
        self.pieces = [piece for shard in self.shards for piece in self._pieces_of(shard)]
        earlier = caller.state
        caller.state = defaultdict(dict)
        for piece in self.pieces:
            for name, value in earlier.get(piece.source, {}).items():
                caller.state[piece.weights][name] = self._part_of(piece, value)
        caller.param_groups = list(param_groups)
        group_of = {p: number for number, group in enumerate(param_groups) for p in group["params"]}
        self._members: list[list[nn.Parameter]] = [[] for _ in param_groups]
        for piece in self.pieces:
            self._members[group_of[piece.source]].append(piece.weights)

    @staticmethod
    def _pieces_of(shard: Shard) -> Iterator[ShardPiece]:
        for name, parameter, start, stop, offset in shard.bucket.pieces():
            flat = shard.main[offset : offset + stop - start]
            is_whole = stop - start == parameter.numel()
            yield ShardPiece(
                shard, name, parameter, offset, nn.Parameter(flat.view(parameter.shape) if is_whole else flat)
            )

    @staticmethod
    def _part_of(piece: ShardPiece, value: Any) -> Any:
        """Return the part of state from before the engine, such as Adagrad's initial sums."""
        if not isinstance(value, Tensor) or value.shape != piece.source.shape or not value.dim():
            return deepcopy(value)
        _, _, start, stop, _ = next(span for span in piece.shard.bucket.pieces() if span[1] is piece.source)
        return value.flatten()[start:stop].to(piece.weights, copy=True).view(piece.weights.shape)

    def _update_all(self, lr: float, decoupled_lr: float | None, weight_decay: float | None, factor: float) -> None:
        """Take a step of the caller's optimizer; rates are in its groups."""
        for shard in self.shards:
            if shard.is_on_other_device and not shard.is_narrow:
                shard.main.copy_(shard.bucket.weight_shard)
        for piece in self.pieces:
            grad = piece.shard.bucket.grad_shard[piece.span].to(piece.weights, copy=True).mul_(factor)
            piece.weights.grad = grad.view(piece.weights.shape)
        self._step()
        for shard in self.shards:
            if shard.is_narrow or shard.is_on_other_device:
                shard.bucket.weight_shard.copy_(shard.main)

    def _step(self) -> None:
        """Call the caller's ``step`` on the pieces."""
        listed = [group["params"] for group in self.param_groups]
        try:
            for group, members in zip(self.param_groups, self._members, strict=True):
                group["params"] = members
            type(self.caller).step(self.caller)
        finally:
            for group, params in zip(self.param_groups, listed, strict=True):
                group["params"] = params
            for piece in self.pieces:
                piece.weights.grad = None

    # Checkpoints.

    @torch.no_grad()
    def allocate_state(self) -> None:
        """Let the caller's optimizer create its state, with a step on gradients of zero; weights do not change."""
        before = [shard.main.clone() for shard in self.shards]
        for piece in self.pieces:
            piece.weights.grad = torch.zeros_like(piece.weights)
        self._step()
        for shard, main in zip(self.shards, before, strict=True):
            shard.main.copy_(main)

    def saved_boxes(self) -> Iterator[TensorBox]:
        """Yield the caller's state in the parts that this rank saves."""
        for bucket, name, flat in self._flat_states():
            yield from self._boxes(bucket, name, flat, bucket.saved_span)
        yield from (box for _, _, box in self._other_boxes())

    def load(self, reader: FillsBoxes, groups: Sequence[dict[str, Any]], *, has_state: bool = True) -> None:
        """Fill the caller's state from a checkpoint, or discard it without ``has_state``; see ``group_settings``."""
        if has_state:
            self.allocate_state()
        else:
            self.caller.state.clear()
        for group, stored in zip(self.param_groups, groups, strict=False):
            group.update({n: tuple(v) if isinstance(v, list) else v for n, v in stored.items() if n in group})
        for bucket, name, flat in self._flat_states():
            reader.fill(self._boxes(bucket, name, flat, bucket.shard))
            for piece in self.pieces:
                state = self.caller.state[piece.weights].get(name)
                if piece.shard.bucket is bucket and _is_full(piece, state):
                    state.copy_(flat[piece.span].view(state.shape))
        boxes = list(self._other_boxes())
        reader.fill(box for _, _, box in boxes)
        for piece, name, box in boxes:
            value = self.caller.state[piece.weights][name]
            if not isinstance(value, Tensor):
                self.caller.state[piece.weights][name] = type(value)(box.memory.item())

    def group_settings(self) -> list[dict[str, Any]]:
        """Return the settings of the groups that are JSON values; some optimizers count steps there."""
        return [{n: v for n, v in group.items() if n != "params" and is_json(v)} for group in self.param_groups]

    def _flat_states(self) -> Iterator[tuple[Bucket, str, Tensor]]:
        """Yield copies of state with an element for each weight, in the layout of the shard."""
        for shard in self.shards:
            pieces = [piece for piece in self.pieces if piece.shard is shard]
            names = dict.fromkeys(n for p in pieces for n, v in self.caller.state[p.weights].items() if _is_full(p, v))
            for name in names:
                states = {piece: self.caller.state[piece.weights].get(name) for piece in pieces}
                dtype = next(state.dtype for piece, state in states.items() if _is_full(piece, state))
                flat = torch.zeros(shard.main.numel(), dtype=dtype, device=shard.main.device)
                for piece, state in states.items():
                    if _is_full(piece, state):
                        flat[piece.span] = state.flatten()
                yield shard.bucket, name, flat

    def _boxes(self, bucket: Bucket, name: str, flat: Tensor, span: slice) -> Iterator[TensorBox]:
        first = span.start - bucket.shard.start
        owners = {p.source for p in self.pieces if _is_full(p, self.caller.state[p.weights].get(name))}
        for parameter_name, parameter, start, stop, offset in bucket.pieces(span):
            if parameter not in owners:
                continue  # its state of this name has another shape, or there is none
            values = flat[first + offset : first + offset + stop - start]
            label = f"optimizer.{name}.{parameter_name}"
            shape = tuple(parameter.shape)
            yield from pieces_of(label, spec_of(parameter), shape, start, stop, values)

    def _other_boxes(self) -> Iterator[tuple[ShardPiece, str, TensorBox]]:
        """Yield state of other shapes: counters, and factors of whole matrices."""
        for piece in self.pieces:
            first = next(start for _, p, start, *_ in piece.shard.bucket.pieces() if p is piece.source) == 0
            for name, value in self.caller.state[piece.weights].items():
                if value is None or _is_full(piece, value):
                    continue
                memory = value if isinstance(value, Tensor) else torch.tensor(value)
                shape = tuple(memory.shape)
                box = Box((0,) * len(shape), shape)
                owned = first and piece.shard.bucket.is_writer
                yield piece, name, TensorBox(f"optimizer.{name}.of.{piece.name}", shape, box, memory, owned=owned)


def _is_full(piece: ShardPiece, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == piece.weights.shape


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``step`` cannot be called without a closure, as for L-BFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
