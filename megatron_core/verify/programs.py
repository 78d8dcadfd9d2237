"""Compare another program's training step on several ranks with the same step on one: the first wrong tensor.

The program may use Megatron's layers, DTensors, FSDP2 or DeepSpeed; this package is not needed for anything else. Its
run on one rank stores outputs of modules, gradients of these outputs, gradients of parameters and further values in a
folder; a run on several ranks compares its tensors with them while it runs.

A rank's tensor is a part of the whole one: some dimensions are shorter by the sizes of parallel axes. The rank's index
on an axis tells which part it must have; where several axes have the same size, each assignment of axes to dimensions
is tried, and the tensor is right if one fits.
"""

from __future__ import annotations

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
from megatron_core.parallel.texts import tell_all
from megatron_core.verify.parts import Axis, Block, parts_of, sliced

FORWARD, BACKWARD, GRADIENT, VALUE = "forward", "backward", "gradient", "value"
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest error, relative to the largest element of the whole tensor, by the dtype of the compared run."""
WEIGHTS = "weights.npz"
_SEPARATOR = "|"


class Place(NamedTuple):
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
class Difference:
    """A tensor that differs on one rank."""

    place: Place
    rank: int
    error: float
    """Relative to the largest element of the whole tensor; inf for a shape that does not fit."""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.place}, on rank {self.rank} (off by {self.error:.1e}){self.reason}"


def compare(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    skip: Iterable[str] = (),
    bound: float | None = None,
    copy_weights: bool = True,
    averaged: int = 1,
    **axes: Axis,
) -> Comparison:
    """Record a step of ``model`` on one rank, or compare it on several with the record in ``folder``.

    Call it before the step, with the initial weights: a run on several ranks receives its parts of the recorded weights
    (``copy_weights``; not for parameters that DeepSpeed has partitioned). ``axes``: for each parallel axis by which
    tensors are split, such as ``tp`` or ``cp``, this rank's index and the number of ranks. ``model``: all stages or
    chunks of this rank. ``skip``: patterns of module names that are not compared, because their tensors are partial
    sums. ``bound``: largest relative error, by default that of the dtype. ``averaged``: number of ranks over which the
    program averages gradients later; the gradients of outputs are larger by this factor.

    Errors: ``DataError`` if several ranks run and the folder has no record.
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
        self._models, self._folder, self._skip, self._bound = models, folder, skip, bound
        self._averaged = averaged
        self._axes = {name: axis for name, axis in axes.items() if axis[1] > 1}
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self.records = not dist.is_initialized() or dist.get_world_size() == 1
        """Whether this is the run on one rank."""
        self._micro_batch, self._calls = 0, dict[tuple[str, str], int]()
        self._values: dict[str, np.ndarray] = {}
        self._order: list[str] = []
        self.found: list[Difference] = []
        """The differences of this rank, in the order of its program."""
        if self.records:
            folder.mkdir(parents=True, exist_ok=True)
            _store(folder / WEIGHTS, {name: _numbers(_whole(p)) for name, p in self._parameters()})
        else:
            self._values = _loaded(folder / "tensors.npz")
            self._order = list(self._values)
            if copy_weights:
                self._copy(_loaded(folder / WEIGHTS))
        for name, module in self._modules():
            if not any(fnmatch(name, pattern) for pattern in self._skip):
                module.register_forward_hook(partial(self._leave, name))

    def micro_batch(self, number: int) -> None:
        """Tell which micro-batch of the global batch is computed next; both runs give a micro-batch the same number."""
        self._micro_batch = number
        self._calls.clear()

    def value(self, name: str, value: Tensor | float) -> None:
        """Compare another value, such as the loss, the gradient norm or a weight after the update."""
        self._take(Place(VALUE, name, 0, 0), torch.as_tensor(value))

    def gradients(self, of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad) -> None:
        """Compare the gradients of all parameters, after they are summed over the ranks; ``of`` returns a gradient.

        Examples: ``lambda p: p.main_grad`` (Megatron), ``deepspeed.utils.safe_get_full_grad`` (DeepSpeed).
        """
        for name, parameter in self._parameters():
            gradient = of(parameter)
            if gradient is not None:
                self._take(Place(GRADIENT, name, 0, 0), gradient, _block_of(parameter))

    def finish(self) -> list[str]:
        """Store the record, or return the differences of all ranks, the earliest of the program first.

        A collective call. [] if nothing differs. With several differences the first one is the cause, or next to it.
        """
        if self.records:
            _store(self._folder / "tensors.npz", self._values)
            return []
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        own = [f"{self._order.index(_key(each.place))}\t{each}" for each in self.found]
        lines = [line for text in tell_all("\n".join(own), torch.device(device)) for line in text.splitlines()]
        return [line.split("\t", 1)[1] for line in sorted(lines, key=lambda line: int(line.split("\t")[0]))]

    def _copy(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, parameter in self._parameters():
            if name not in weights:
                raise DataError(f"{self._folder}: the record has no parameter {name}; compare the same model")
            whole = torch.from_numpy(weights[name]).to(parameter.device, parameter.dtype)
            with torch.no_grad():
                if isinstance(parameter, DTensor):
                    parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
                else:
                    parameter.copy_(sliced(whole, parameter.shape, self._axes, _block_of(parameter)))

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for number, x in enumerate(_tensors(output)):
            label = name if number == 0 else f"{name}[{number}]"
            call = self._calls[FORWARD, label] = self._calls.get((FORWARD, label), -1) + 1
            micro = self._micro_batch
            self._take(Place(FORWARD, label, micro, call), x)
            if x.requires_grad:
                place = Place(BACKWARD, label, micro, call)
                x.register_hook(lambda grad, place=place: self._take(place, grad / self._averaged))

    def _take(self, place: Place, x: Tensor, block: Block | None = None) -> None:
        """Store or compare a tensor."""
        x, key = _whole(x.detach()), _key(place)
        if not x.is_floating_point():
            return
        if self.records:
            self._values.setdefault(key, _numbers(x))
            return
        expected = self._values.get(key)
        if expected is None:
            return
        error, reason = self._error(_numbers(x), expected, block)
        bound = BOUNDS.get(x.dtype, 0.1) if self._bound is None else self._bound
        if not error <= bound and place not in [each.place for each in self.found]:
            self.found.append(Difference(place, self._rank, error, reason))

    def _error(self, x: np.ndarray, expected: np.ndarray, block: Block | None) -> tuple[float, str]:
        """The smallest error over the parts that ``x`` may be, and the likely reason for it."""
        scale = max(float(np.abs(expected).max(initial=0.0)), 1e-30)
        parts = list(parts_of(expected, x.shape, self._axes, block))
        if not parts:
            return np.inf, f": its shape {list(x.shape)} does not divide {list(expected.shape)}"
        errors = [float(np.abs(x - part).max(initial=0.0)) / scale for part in parts]
        best = int(np.argmin(np.nan_to_num(errors, nan=np.inf)))
        return errors[best], _factor(x, parts[best])

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules with their names in the model on one rank."""
        for model in self._models:
            numbers = _layer_numbers(model)
            for name, module in model.named_modules():
                yield _renamed(name, numbers) or "model", module

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model in self._models:
            numbers = _layer_numbers(model)
            yield from ((_renamed(name, numbers), parameter) for name, parameter in model.named_parameters())


def _layer_numbers(model: nn.Module) -> dict[str, str]:
    """Names of layers that know their number in the whole model (``layer_number``, from 1), by their local names."""
    found = {}
    for name, module in model.named_modules():
        number, (head, _, last) = getattr(module, "layer_number", None), name.rpartition(".")
        if isinstance(number, int) and last.isdigit():
            found[name] = f"{head}.{number - 1}"
    return found


def _renamed(name: str, numbers: Mapping[str, str]) -> str:
    """``name`` without wrappers' prefixes, and with the layers' numbers in the whole model."""
    for local, whole in numbers.items():
        if name == local or name.startswith(f"{local}."):
            name = whole + name[len(local) :]
            break
    while name == "module" or name.startswith("module."):
        name = name[len("module.") :]
    return name


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
        for each in output:
            yield from _tensors(each)


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _numbers(x: Tensor) -> np.ndarray:
    return x.detach().to("cpu", torch.float64).numpy()


def _key(place: Place) -> str:
    return _SEPARATOR.join(map(str, place))


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
