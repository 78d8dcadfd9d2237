"""Compare another program's training step on several ranks with the same step on one: the first wrong tensor.

The program may use Megatron's layers, DTensors, FSDP2 or DeepSpeed; this package is not needed for anything else. Its
run on one rank stores outputs of modules, gradients of these outputs, gradients of parameters and further values in a
folder; a run on several ranks compares its tensors with them while it runs.

A rank's tensor is a part of the whole one: some dimensions are shorter by the sizes of parallel axes. The rank's index
on an axis tells which part it must have; where several axes have the same size, each assignment of axes to dimensions
is tried, and the tensor is right if one fits.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_core.errors import DataError
from megatron_core.parallel.texts import gather_from_all_ranks, listed, raising_on_all_ranks
from megatron_core.verify.explanations import Contributions, explain_gradients
from megatron_core.verify.parts import Axis, Block, gathered_tensor, in_float64, possible_parts, sliced
from megatron_core.verify.whole_names import parameters_of, whole_modules

FORWARD = "forward"
BACKWARD = "backward"
GRADIENT = "gradient"
VALUE = "value"
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest error, relative to the largest element of the whole tensor, by the dtype of the compared run."""
WEIGHTS = "weights.npz"
CONTRIBUTIONS = "contributions.npz"
"""Gradients of each micro-batch in the run on one rank, with numbers of tokens and samples."""
_SEPARATOR = "|"


class ProgramTensor(NamedTuple):
    """A tensor of the program."""

    direction: str
    """Output of a module (``forward``), gradient of an output (``backward``) or of a parameter, or another value."""
    name: str
    micro_batch: int
    call: int
    """Number of the call of the module in the micro-batch, from 0."""

    def __str__(self) -> str:
        again = f", call {self.call + 1}" if self.call else ""
        what = {
            FORWARD: f"output of {self.name}, in forward",
            BACKWARD: f"gradient of the output of {self.name}, in backward",
            GRADIENT: f"gradient of the parameter {self.name}",
            VALUE: self.name,
        }[self.direction]
        return f"{what} of micro-batch {self.micro_batch}{again}" if self.direction in (FORWARD, BACKWARD) else what


@dataclass(frozen=True)
class ProgramDifference:
    """A tensor that differs on one rank."""

    point: ProgramTensor
    rank: int
    error: float
    """Relative to the largest element of the whole tensor; inf for a shape that does not fit."""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.point}, on rank {self.rank} (off by {self.error:.1e}){self.reason}"


def compare(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    skip: Iterable[str] = (),
    bound: float | None = None,
    copy_weights: bool = True,
    averaged: int = 1,
    **axes: Axis,
) -> "Comparison":
    """Record a step of ``model`` on one rank, or compare it on several with the record in ``folder``.

    Call it before the step, with the initial weights: a run on several ranks receives its parts of the recorded weights
    (``copy_weights``; not for parameters that DeepSpeed has partitioned). ``axes``: for each parallel axis by which
    tensors are split, such as ``tp`` or ``cp``, this rank's index and the number of ranks. ``model``: all stages or
    chunks of this rank. ``skip``: patterns of module names that are not compared, because their tensors are partial
    sums. ``bound``: largest relative error, by default that of the dtype. ``averaged``: number of ranks over which the
    program averages gradients later; the gradients of outputs are larger by this factor.

    Errors: ``DataError`` if several ranks run and the folder has no record, or not the same parameters.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    return Comparison(models, Path(folder), list(skip), bound, axes, copy_weights=copy_weights, averaged=averaged)


class Comparison:
    """A step that is recorded or compared."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        folder: Path,
        skip: Sequence[str],
        bound: float | None,
        axes: Mapping[str, Axis],
        *,
        copy_weights: bool,
        averaged: int,
    ) -> None:
        self._models = models
        self._folder = folder
        self._skip = skip
        self._bound = bound
        self._averaged = averaged
        self._axes = {name: axis for name, axis in axes.items() if axis[1] > 1}
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.records = not dist.is_initialized() or dist.get_world_size() == 1
        """Whether this is the run on one rank."""
        self._micro_batch = 0
        self._contributions = Contributions()
        self._gradient_bound = 0.0
        self._calls = dict[tuple[str, str], int]()
        self._values: dict[str, np.ndarray] = {}
        self._order: dict[str, int] = {}
        self._compared = set[str]()
        self._unknown = dict[ProgramTensor, None]()
        self.found: list[ProgramDifference] = []
        """The differences of this rank, in the order of its program."""
        if self.records:
            folder.mkdir(parents=True, exist_ok=True)
            _store(folder / WEIGHTS, {name: in_float64(p) for name, p in parameters_of(self._models)})
        else:
            with raising_on_all_ranks(self._device()):
                self._values = _loaded(folder / "tensors.npz")
            self._order = {key: number for number, key in enumerate(self._values)}
            if copy_weights:
                self._copy()
        for name, module in whole_modules(self._models):
            if not any(fnmatch(name, pattern) for pattern in self._skip):
                module.register_forward_hook(partial(self._leave, name))

    def micro_batch(self, number: int, *, tokens: float = 0, samples: float = 0) -> None:
        """Set the number of the next micro-batch in the global batch; both runs use the same numbers.

        The run on one rank has as many micro-batches as all ranks have together. ``tokens``: tokens of its loss;
        ``samples``: its samples; explanations of wrong gradients use both.
        """
        if self.records:
            self._contributions.add(self._models)
        self._contributions.begin(number, tokens, samples)
        self._micro_batch = number
        self._calls.clear()

    def value(self, name: str, value: Tensor | float) -> None:
        """Compare another value, such as the loss, the gradient norm or a weight after the update."""
        self._take(ProgramTensor(VALUE, name, 0, 0), torch.as_tensor(value))

    def gradients(self, of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad) -> None:
        """Compare the gradients of all parameters, after they are summed over the ranks; ``of`` returns a gradient.

        Examples: ``lambda p: p.main_grad`` (Megatron), ``deepspeed.utils.safe_get_full_grad`` (DeepSpeed).
        """
        if self.records:
            self._contributions.add(self._models)
        for name, parameter in parameters_of(self._models):
            gradient = of(parameter)
            if gradient is not None:
                self._take(ProgramTensor(GRADIENT, name, 0, 0), gradient, _block_of(parameter))
                if not self.records:
                    self._contributions.measure(name, gradient, _block_of(parameter))

    def finish(self) -> list[str]:
        """Store the record, or return the differences of all ranks, the earliest of the program first.

        A collective call. [] if nothing differs. With several differences the first one is the cause, or next to it.
        The last lines explain wrong gradients where a combination of the micro-batches' recorded gradients reproduces
        them, and name gradients and values that only one of the two runs has; for outputs this is a warning.

        Errors: ``DataError`` on all ranks if no tensor was compared.
        """
        if self.records:
            _store(self._folder / "tensors.npz", self._values)
            _store(self._folder / CONTRIBUTIONS, self._contributions.arrays())
            return []
        local_lines = [f"{self._order[_key(difference.point)]}\t{difference}" for difference in self.found]
        lines = [line.split("\t", 1) for line in self._gather_lines(local_lines)]
        return (
            [text for _, text in sorted(lines, key=lambda line: int(line[0]))]
            + self._explanations()
            + self._one_sided()
        )

    def _explanations(self) -> list[str]:
        """Why gradients differ, of all ranks; a collective call."""
        numbers = gather_from_all_ranks(",".join(map(str, self._contributions.amounts)), self._device())
        ranks = [[int(number) for number in text.split(",") if number] for text in numbers]
        path = self._folder / CONTRIBUTIONS
        recorded = {
            point.name: self._values[key]
            for key, point in ((key, _place(key)) for key in self._values)
            if point.direction == GRADIENT
        }
        pairs, order = self._contributions.pairs(_loaded(path) if path.is_file() else {}, recorded, self._axes)
        division = self._contributions.division(order, ranks, self._rank, self._axes, self._averaged)
        lines = explain_gradients(pairs, division, self._gradient_bound) if self.found else []
        return list(dict.fromkeys(self._gather_lines(lines)))

    def _one_sided(self) -> list[str]:
        """Sentences about gradients and values that only one of the two runs has; a collective call."""
        bits = sum(1 << self._order[key] for key in self._compared)
        compared = 0
        for text in self._gather_lines([f"{bits:x}"]):
            compared |= int(text, 16)
        missing = [_place(key) for key, number in self._order.items() if not compared >> number & 1]
        unknown = [_place(key) for key in dict.fromkeys(self._gather_lines([_key(point) for point in self._unknown]))]
        if not compared:
            raise DataError(
                f"{self._folder}: no tensor of this run is in the record, so that nothing was compared. The record has "
                f"{_named(missing)}; this run has {_named(unknown)}. Give compare the same model in both runs, and "
                "call micro_batch with the same numbers"
            )
        lines = []
        for places, reason in ((missing, "no rank compared"), (unknown, "the record does not have")):
            results = [point for point in places if point.direction in (GRADIENT, VALUE)]
            outputs = [point for point in places if point.direction in (FORWARD, BACKWARD)]
            if results:
                lines.append(f"{reason}: {_named(results)}")
            if outputs and self._rank == 0:
                warnings.warn(f"{reason}: {_named(outputs)}", stacklevel=3)
        return lines

    def _gather_lines(self, lines: list[str]) -> list[str]:
        return [line for text in gather_from_all_ranks("\n".join(lines), self._device()) for line in text.splitlines()]

    def _device(self) -> torch.device:
        nccl = dist.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

    def _copy(self) -> None:
        """Set the weights to this rank's parts of the recorded ones."""
        split: list[tuple[DTensor, Tensor]] = []
        # Names and shapes are checked on all ranks before ``distribute_tensor``, in which ranks wait for each other.
        with raising_on_all_ranks(self._device()), torch.no_grad():
            weights = _loaded(self._folder / WEIGHTS)
            for name, parameter in parameters_of(self._models):
                if name not in weights:
                    raise DataError(f"{self._folder}: the record has no parameter {name}; compare the same model")
                recorded = torch.from_numpy(weights[name])
                fits = recorded.ndim == parameter.ndim
                if isinstance(parameter, DTensor):
                    fits = recorded.shape == parameter.shape
                if not fits:
                    shapes = f"{list(recorded.shape)} in the record and {list(parameter.shape)} in this run"
                    raise DataError(
                        f"{self._folder}: the parameter {name} has the shape {shapes}; compare the same model, or set "
                        "copy_weights=False if both runs begin with the same weights"
                    )
                if isinstance(parameter, DTensor):
                    split.append((parameter, recorded))
                else:
                    parameter.copy_(sliced(recorded, parameter.shape, self._axes, _block_of(parameter)))
        with torch.no_grad():
            for target, values in split:
                local_values = values.to(target.device, target.dtype)
                target.copy_(distribute_tensor(local_values, target.device_mesh, target.placements))

    @torch.compiler.disable
    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # in backward: activation checkpointing computes the module again
            return
        for number, x in enumerate(_tensors(output)):
            label = name if number == 0 else f"{name}[{number}]"
            call = self._calls[FORWARD, label] = self._calls.get((FORWARD, label), -1) + 1
            micro = self._micro_batch
            self._take(ProgramTensor(FORWARD, label, micro, call), x)
            if x.requires_grad:
                point = ProgramTensor(BACKWARD, label, micro, call)
                x.register_hook(lambda grad, point=point: self._take(point, grad / self._averaged))

    def _take(self, point: ProgramTensor, x: Tensor, block: Block | None = None) -> None:
        """Store or compare a tensor."""
        x = gathered_tensor(x.detach())
        key = _key(point)
        if not x.is_floating_point():
            return
        if self.records:
            self._values.setdefault(key, in_float64(x))
            return
        expected = self._values.get(key)
        if expected is None:
            self._unknown[point] = None
            return
        self._compared.add(key)
        error, reason = self._error(in_float64(x), expected, block)
        bound = BOUNDS.get(x.dtype, 0.1) if self._bound is None else self._bound
        if point.direction == GRADIENT:
            self._gradient_bound = max(self._gradient_bound, bound)
        if not error <= bound and point not in [difference.point for difference in self.found]:
            self.found.append(ProgramDifference(point, self._rank, error, reason))

    def _error(self, x: np.ndarray, expected: np.ndarray, block: Block | None) -> tuple[float, str]:
        """The smallest error over the parts that ``x`` may be, and the likely reason for it."""
        scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
        pieces = list(possible_parts(expected, x.shape, self._axes, block))
        if not pieces:
            return np.inf, f": its shape {list(x.shape)} does not divide {list(expected.shape)}"
        errors = [float(np.abs(x - piece).max(initial=0.0)) / scale for piece in pieces]
        best = int(np.argmin(np.nan_to_num(errors, nan=np.inf)))
        return errors[best], _factor(x, pieces[best])


def _block_of(parameter: nn.Parameter) -> Block | None:
    """How Megatron's attributes of a parameter say that it is split."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return None
    return Block(int(getattr(parameter, "partition_dim", 0)), int(getattr(parameter, "partition_stride", 1)))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if not isinstance(output, nn.Parameter):  # such as a bias that is added later, whose gradient may be a part
            yield output
    elif isinstance(output, tuple | list):
        for inner in output:
            yield from _tensors(inner)


def _key(point: ProgramTensor) -> str:
    return _SEPARATOR.join(map(str, point))


def _place(key: str) -> ProgramTensor:
    direction, tail = key.split(_SEPARATOR, 1)
    name, micro_batch, call = tail.rsplit(_SEPARATOR, 2)
    return ProgramTensor(direction, name, int(micro_batch), int(call))


def _named(places: Sequence[ProgramTensor]) -> str:
    return listed(places) if places else "no tensors"


def _store(path: Path, values: Mapping[str, np.ndarray]) -> None:
    save: Any = np.savez  # its type hints do not allow arrays by name
    save(path, allow_pickle=False, **values)


def _loaded(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; run the program on one rank first, with the same folder")
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _factor(x: np.ndarray, expected: np.ndarray) -> str:
    """A sentence if ``x`` is a multiple of the expected tensor, or has no elements other than 0."""
    squares = float(np.vdot(expected, expected))
    if not squares or not np.isfinite(x).all():
        return ""
    if not x.any():
        return ": it is 0"
    factor = float(np.vdot(expected, x)) / squares
    if np.abs(x - factor * expected).max() <= 1e-4 * np.abs(expected).max() and abs(factor - 1.0) > 1e-3:
        return f": it is {factor:.4g} times the right value"
    return ""
