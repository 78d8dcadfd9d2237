"""Find the first wrong tensor of a layout that fails: module, forward or backward, rank, and latest collective.

One more step runs in one process and under the layout. Outputs of modules, and the gradients of these outputs, are
compared where their rows are positions of the residual sequence: ``[n, b, h]``. Then the order of one process's program
tells which of the wrong tensors is the first; everything that is computed from it is wrong, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.training.setup import Run
from megatron_core.transformer.block import TransformerBlock
from megatron_core.transformer.context import SequenceContext
from megatron_core.verify.compare import FLOAT64_BOUND, Errors

FORWARD, BACKWARD = "forward", "backward"
MOST_SAMPLES = 256
"""Number of samples of the step that are compared; they bound the memory."""


class Key(NamedTuple):
    """A tensor of the program: the output of ``module`` for one sample, or the gradient of this output."""

    direction: str
    module: str
    sample: int


@dataclass
class Reference:
    """The tensors of one process, ``[s, h]``, in the order of its program."""

    values: dict[Key, np.ndarray] = field(default_factory=dict)

    def order(self) -> list[tuple[str, str]]:
        """Directions and modules in the order of the program: all forwards, then all backwards."""
        first = dict.fromkeys((key.direction, key.module) for key in self.values)
        return sorted(first, key=lambda each: each[0] == BACKWARD)  # stable


@dataclass(frozen=True)
class Difference:
    """A wrong tensor on a rank."""

    direction: str
    module: str
    rank: str
    error: float
    collective: str
    """The latest collective or message of the rank before the tensor was computed."""


class _Watch:
    """Hooks on the modules of a rank's stages; subclasses receive each tensor that can be compared."""

    def __init__(self, run: Run) -> None:
        self._now = threading.local()  # a pair of functions runs in two threads
        self._seen: set[Key] = set()
        self._width = run.config.model.hidden_size
        for stage in run.stages.values():
            for name, module in stage.named_modules():
                module.register_forward_pre_hook(lambda _, args: self._enter(args))
                if not isinstance(module, TransformerBlock):  # its layers depend on the stage
                    module.register_forward_hook(lambda _, args, output, name=name: self._leave(name, output))

    def take(self, key: Key, positions: Tensor, values: Tensor) -> None:
        """Receive the rows ``values`` ``[n, h]`` at ``positions`` ``[n]`` of a tensor."""
        raise NotImplementedError

    def _enter(self, args: Sequence[Any]) -> None:
        for each in args:
            if isinstance(each, SequenceContext):
                self._now.context = each

    def _leave(self, name: str, output: Any) -> None:
        context = getattr(self._now, "context", None)
        x = output[0] if isinstance(output, tuple) else output
        if context is None or not name or context.sample_index is None or not isinstance(x, Tensor):
            return
        if x.shape != (len(context.residual_positions), len(context.sample_index), self._width):
            return
        self._receive(FORWARD, name, context, x)
        if x.requires_grad:
            x.register_hook(lambda grad: self._receive(BACKWARD, name, context, grad))

    def _receive(self, direction: str, name: str, context: SequenceContext, x: Tensor) -> None:
        assert context.sample_index is not None and context.residual_positions is not None, "checked by _leave"
        for column, sample in enumerate(context.sample_index.tolist()):
            key = Key(direction, name, sample)
            if sample < MOST_SAMPLES and key not in self._seen:  # a forward may run once more in backward
                self._seen.add(key)
                self.take(key, context.residual_positions, x.detach()[:, column])


class Recorder(_Watch):
    """Stores the tensors of one process."""

    def __init__(self, run: Run) -> None:
        self.reference = Reference()
        super().__init__(run)

    def take(self, key: Key, positions: Tensor, values: Tensor) -> None:
        """Store a tensor, which is whole."""
        self.reference.values[key] = values.double().cpu().numpy().copy()


class Comparer(_Watch):
    """Compares a rank's tensors with those of one process; keeps the first wrong tensor of each module."""

    def __init__(self, run: Run, reference: Reference, bound: float = FLOAT64_BOUND) -> None:
        self._reference, self._bound = reference, bound
        self._rank = f"rank {run.world.rank} {run.groups.prefix}"
        self.found: dict[tuple[str, str], Difference] = {}
        super().__init__(run)

    def take(self, key: Key, positions: Tensor, values: Tensor) -> None:
        """Compare the rows of a tensor."""
        expected = self._reference.values.get(key)
        if expected is None or (key.direction, key.module) in self.found:
            return
        scale = max(float(np.abs(expected).max(initial=0.0)), 1e-12)
        found = values.double().cpu().numpy()
        error = float(np.abs(found - expected[positions.cpu().numpy()]).max(initial=0.0)) / scale
        if not error <= self._bound:
            calls = RECORDER.content()["calls"]
            latest = f"{calls[-1]['what']} over {_ranks(calls[-1]['ranks'])}" if calls else ""
            self.found[key.direction, key.module] = Difference(key.direction, key.module, self._rank, error, latest)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{', ...' * (len(ranks) > 8)}"


def describe(reference: Reference, found: Iterable[Mapping[tuple[str, str], Difference]], errors: Errors) -> str:
    """One sentence about the first wrong tensor; ``errors`` are those of the quantities beyond their bounds."""
    order = reference.order()
    wrong: dict[tuple[str, str], list[Difference]] = {}
    for of_rank in found:
        for place, difference in of_rank.items():
            wrong.setdefault(place, []).append(difference)
    for number, place in enumerate(order):
        if place in wrong:
            before = next((each for each in reversed(order[:number]) if each[0] == place[0]), None)
            also = "; the loss is wrong before it" if place[0] == BACKWARD and "loss0" in errors else ""
            return _of_tensor(place, wrong[place], before) + also
    gradients = _parameters(errors, "grad0.", [module for direction, module in order if direction == BACKWARD])
    if gradients:
        return (
            f"first wrong: gradient of {_first(gradients)}; outputs of modules and their gradients are right, so that "
            "its own product or a sum of parameter gradients over ranks is wrong"
        )
    if "loss0" in errors:
        return "first wrong: the loss that is reported; outputs of modules and all gradients are right"
    if "norm0" in errors:
        return "first wrong: the gradient norm of the first step; all gradients are right"
    weights = _parameters(errors, "weight.", [module for direction, module in order if direction == FORWARD])
    if weights:
        return (
            f"first wrong: updated weight {_first(weights)}; losses, gradients and norm of the first step are right, "
            "so that the optimizer or a gather of weights is wrong"
        )
    reports = [name for name in errors if name.startswith("report")]
    return (
        f"first wrong: {_first(reports or sorted(errors) or ['copies of a value'])}; the first step is right otherwise"
    )


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _of_tensor(place: tuple[str, str], there: Sequence[Difference], before: tuple[str, str] | None) -> str:
    direction, module = place
    first = there[0]
    what = f"output of {module}" if direction == FORWARD else f"gradient of the output of {module}"
    others = f" and {len(there) - 1} more ranks" if len(there) > 1 else ""
    right = f"; right before it: {before[1]}" if before is not None else ""
    after = f", after {first.collective}" if first.collective else ""
    return f"first wrong: {what}, in {direction}, on {first.rank}{others} (off by {first.error:.1e}){after}{right}"


def _parameters(errors: Errors, label: str, modules: Sequence[str]) -> list[str]:
    """Wrong parameters in the order in which backward computes their gradients, as far as ``modules`` tells."""
    names = [name.removeprefix(label) for name in errors if name.startswith(label)]
    places = {module: number for number, module in enumerate(modules)}

    def place(name: str) -> int:
        parts = name.split(".")
        owners = (".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1))
        return next((places[owner] for owner in owners if owner in places), len(places))

    return sorted(names, key=place)
