"""Find the first wrong tensor of a layout that fails: module, forward or backward, rank, and latest collective.

The step with the first wrong quantity runs once more in one process and under the layout. The weights before it are
compared, then the outputs of modules and the gradients of these outputs, where their rows are positions of the residual
sequence: ``[n, b, h]``. The order of one process's program tells which of the wrong tensors is the first; everything
that is computed from it is wrong, too.
"""

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from megatron_core.parallel.texts import listed
from megatron_core.resilience.watchdog import recorded_calls
from megatron_core.training.setup import Run
from megatron_core.transformer.block import TransformerBlock
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.joined import JoinedParts
from megatron_core.verify.bounds import FLOAT64_BOUND, Errors
from megatron_core.verify.trace import RankTrace, assemble

FORWARD = "forward"
BACKWARD = "backward"
MOST_SAMPLES = 256
"""Number of samples of the step that are compared; they bound the memory."""
MOST_ROWS = 256
"""Number of rows among which a wrong one is sought."""


class ActivationKey(NamedTuple):
    """A tensor of the program: the output of ``module`` for one sample, or the gradient of this output."""

    direction: str
    module: str
    sample: int


@dataclass
class Reference:
    """The tensors of one process: weights before a step, and ``[s, h]`` of the step in the order of its program."""

    weights: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[ActivationKey, np.ndarray] = field(default_factory=dict)

    def order(self) -> list[tuple[str, str]]:
        """Directions and modules in the order of the program: all forwards, then all backwards."""
        first = dict.fromkeys((key.direction, key.module) for key in self.values)
        return sorted(first, key=lambda entry: entry[0] == BACKWARD)  # stable


@dataclass(frozen=True)
class WrongTensor:
    """A wrong tensor on a rank."""

    direction: str
    module: str
    rank: str
    error: float
    collective: str = ""
    """The latest collective or message of the rank before the tensor was computed."""
    pattern: str = ""
    """How it differs, for example by a factor."""


@dataclass
class RankFindings:
    """One rank's differences from one process."""

    weights: dict[str, WrongTensor] = field(default_factory=dict)
    """By name, before the step."""
    tensors: dict[tuple[str, str], WrongTensor] = field(default_factory=dict)
    """By direction and module."""
    samples: set[int] = field(default_factory=set)
    """The samples that this rank has computed, at least in part."""
    divides_batches: bool = False
    """Whether its micro-batches have documents of several samples, so that tensors of modules are not compared."""


class _Watch:
    """Hooks on the modules of a rank's stages; subclasses receive each tensor that can be compared."""

    def __init__(self, run: Run) -> None:
        self._now = threading.local()  # a pair of functions runs in two threads
        self._seen: set[ActivationKey] = set()
        self._width = run.config.model.hidden_size
        self._first = run.state.consumed_samples
        for stage in run.stages.values():
            joined = (getattr(module, "joined", None) for module in stage.modules())
            partial = {module for joint in joined if isinstance(joint, JoinedParts) for module in joint.partial}
            for name, module in stage.named_modules():
                module.register_forward_pre_hook(lambda _, args: self._enter(args))
                # The layers of a block depend on the stage.
                if not isinstance(module, TransformerBlock) and module not in partial:
                    module.register_forward_hook(lambda _, args, output, name=name: self._leave(name, output))

    def take(self, key: ActivationKey, positions: Tensor, values: Tensor) -> None:
        """Receive the rows ``values`` ``[n, h]`` at ``positions`` ``[n]`` of a tensor."""
        raise NotImplementedError

    def _enter(self, args: Sequence[Any]) -> None:
        for argument in args:
            if isinstance(argument, SequenceContext):
                self._now.context = argument

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
            key = ActivationKey(direction, name, sample)
            if sample - self._first < MOST_SAMPLES and key not in self._seen:  # a forward may run once more in backward
                self._seen.add(key)
                self.take(key, context.residual_positions, x.detach()[:, column])


class Recorder(_Watch):
    """Stores the tensors of one process."""

    def __init__(self, run: Run, group: str = "") -> None:
        weights = assemble([_weights(run, group)]).tensors
        self.reference = Reference({name.removeprefix("weight."): values for name, values in weights.items()})
        super().__init__(run)

    def take(self, key: ActivationKey, positions: Tensor, values: Tensor) -> None:
        """Store a tensor, which is whole."""
        self.reference.values[key] = values.double().cpu().numpy().copy()


class Comparer(_Watch):
    """Compares a rank's tensors with those of one process; keeps the first wrong tensor of each module."""

    def __init__(self, run: Run, reference: Reference, bound: float = FLOAT64_BOUND, *, group: str = "") -> None:
        self._reference = reference
        self._bound = bound
        self._rank = f"rank {run.world.rank} {run.groups.prefix}"
        self.found = RankFindings()
        for label, _, box, values in _weights(run, group).pieces:
            name = label.removeprefix("weight.")
            expected = reference.weights.get(name)
            error = np.inf if expected is None else _error(values, expected[box])
            if not error <= bound and name not in self.found.weights:
                pattern = "" if expected is None else pattern_of(values, expected[box], bound)
                self.found.weights[name] = WrongTensor(FORWARD, name, self._rank, error, pattern=pattern)
        self.found.divides_batches = any(run_part.divides_batches for run_part in run.parts)
        if not self.found.divides_batches:
            super().__init__(run)

    def take(self, key: ActivationKey, positions: Tensor, values: Tensor) -> None:
        """Compare the rows of a tensor."""
        self.found.samples.add(key.sample)
        reference = self._reference.values.get(key)
        if reference is None or (key.direction, key.module) in self.found.tensors:
            return
        actual = values.double().cpu().numpy()
        expected = reference[positions.cpu().numpy()]
        error = _error(actual, expected, reference)
        if not error <= self._bound:
            calls = recorded_calls()["calls"]
            latest = f"{calls[-1]['what']} over {_ranks(calls[-1]['ranks'])}" if calls else ""
            pattern = pattern_of(actual, expected, self._bound, reference)
            self.found.tensors[key.direction, key.module] = WrongTensor(
                key.direction, key.module, self._rank, error, latest, pattern
            )


def _weights(run: Run, group: str) -> RankTrace:
    """This rank's parts of the weights, with the outer group in their names."""
    trace = RankTrace(owner=group)
    trace.add_weights(run.data_parallel, run.stages.values())
    return trace


def _error(actual: np.ndarray, expected: np.ndarray, reference: np.ndarray | None = None) -> float:
    """Largest error, relative to the largest element of ``reference``, by default of ``expected``."""
    if actual.shape != expected.shape:
        return np.inf
    scale = max(float(np.abs(expected if reference is None else reference).max(initial=0.0)), 1e-12)
    error = float(np.abs(actual - expected).max(initial=0.0)) / scale
    return error if np.isfinite(error) else np.inf


def pattern_of(result: np.ndarray, expected: np.ndarray, bound: float, reference: np.ndarray | None = None) -> str:
    """How ``result`` differs from ``expected``, and the errors that usually cause it; empty if nothing is remarkable.

    ``reference``, by default ``expected``, has all rows of one process.
    """
    if result.shape != expected.shape or not np.isfinite(result).all():
        return "its shape differs" if result.shape != expected.shape else "it is not finite"
    square = float((expected * expected).sum())
    factor = float((result * expected).sum()) / square if square else 1.0
    if square and not result.any():
        return "it is 0: nothing arrived, or a mask hides all of it"
    if abs(factor - 1) > bound and _error(result, factor * expected) <= bound:
        return f"it is {factor:.6g} times the right one: a sum or a mean over ranks is missing or repeated"
    if result.ndim < 2:
        return ""
    rows = np.abs(result - expected).max(axis=tuple(range(1, result.ndim)))
    wrong = np.flatnonzero(rows > bound * max(float(np.abs(expected).max()), 1e-12))
    candidates = (expected if reference is None else reference).reshape(-1, result[0].size)
    flat = result.reshape(len(result), -1)[wrong[:MOST_ROWS]]
    nearest = np.abs(flat[:, None] - candidates[None, :MOST_ROWS]).max(axis=-1).min(axis=-1, initial=np.inf)
    if len(candidates) > 1 and (nearest <= bound * max(float(np.abs(candidates).max()), 1e-12)).all():
        return "its rows are right, but in other places: an order, a split or positions are wrong"
    if len(wrong) < len(result):
        rows = f"{len(wrong)} of {len(result)} rows differ, from row {wrong[0]} on"
        return f"{rows}: a mask or the end of a part is wrong"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8]))
    return f"ranks {listed}{', ...' * (len(ranks) > 8)}"


def first_step(errors: Errors) -> int:
    """The step, from 0, of the earliest wrong quantity; 0 if only final weights are wrong."""
    steps = (re.match(r"(?:loss|norm|grad|report)(\d+)", name) for name in errors)
    return min((int(match[1]) for match in steps if match), default=0)


def describe_culprit(reference: Reference, findings: Sequence[RankFindings], errors: Errors) -> str:
    """One sentence about the first wrong tensor; ``errors`` are those of the quantities beyond their bounds.

    ``reference`` and ``findings`` are those of the step ``first_step(errors)``.
    """
    step = first_step(errors)
    text = _first_wrong(reference, findings, errors, step)
    return f"first wrong: {text}" + (f"; in step {step + 1}, all steps before it are right" if step else "")


def _first_wrong(reference: Reference, findings: Sequence[RankFindings], errors: Errors, step: int) -> str:
    """The sentence without its beginning, and without the step."""
    order = reference.order()
    modules = {
        direction_: [module for direction, module in order if direction == direction_]
        for direction_ in (FORWARD, BACKWARD)
    }
    weights = _by_place(finding.weights for finding in findings)
    if weights:
        names = _in_order(weights, modules[FORWARD])
        first = weights[names[0]]
        what = "updated weight" if step else "initial weight"
        cause = "; losses, gradients and norm are right, so that the optimizer or a gather of weights is wrong"
        return f"{what} {_first(names)}, {_where(first)}{cause if step else ''}"
    if any(finding.divides_batches for finding in findings):
        return "not located: micro-batches have documents of several samples; try --context-parallel-size instead"
    computed = set().union(*(finding.samples for finding in findings))
    left_out = sorted({key.sample for key in reference.values} - computed)
    if left_out and findings:
        return f"the samples of the step: no rank computes {listed(left_out)}; the data or the micro-batches are wrong"
    tensors = _by_place(finding.tensors for finding in findings)
    for number, position in enumerate(order):
        if position in tensors:
            before = next((finding for finding in reversed(order[:number]) if finding[0] == position[0]), None)
            also = "; the loss is wrong before it" if position[0] == BACKWARD and f"loss{step}" in errors else ""
            return _of_tensor(position, tensors[position], before) + also
    return _of_quantity(errors, modules, step)


def _of_quantity(errors: Errors, modules: Mapping[str, Sequence[str]], step: int) -> str:
    """The first wrong quantity of a step whose outputs, and their gradients, are right."""
    gradients = _in_order(_parameters(errors, f"grad{step}."), modules[BACKWARD])
    if gradients:
        stale = ", or gradients of the step before are kept" if step else ""
        return (
            f"gradient of the parameter {_first(gradients)}; outputs of modules and their gradients are right, so that "
            f"its own product or a sum of parameter gradients over ranks is wrong{stale}"
        )
    if f"loss{step}" in errors:
        return "the loss that is reported; outputs of modules and all gradients are right"
    if f"norm{step}" in errors:
        return "the gradient norm; all gradients are right"
    reports = sorted(name for name in errors if name.startswith(f"report{step}."))
    if reports:
        return f"{_first(reports)}; losses, gradients and norm are right"
    weights = _in_order(_parameters(errors, "weight."), modules[FORWARD])
    if weights:
        return (
            f"updated weight {_first(weights)}; losses, gradients and norms are right, so that the optimizer or a "
            "gather of weights is wrong"
        )
    return "copies of a value differ between ranks; all else is right"


def _by_place(differences: Iterable[Mapping[Any, WrongTensor]]) -> dict[Any, list[WrongTensor]]:
    """The differences of all ranks by module or weight."""
    wrong: dict[Any, list[WrongTensor]] = {}
    for of_rank in differences:
        for position, difference in of_rank.items():
            wrong.setdefault(position, []).append(difference)
    return wrong


def _first(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def _where(differences: Sequence[WrongTensor]) -> str:
    """Rank, error and pattern."""
    first = differences[0]
    more = f" and {len(differences) - 1} more rank{'s' * (len(differences) > 2)}" if len(differences) > 1 else ""
    return f"on {first.rank}{more} (off by {first.error:.1e}{'; ' * bool(first.pattern)}{first.pattern})"


def _of_tensor(position: tuple[str, str], differences: Sequence[WrongTensor], before: tuple[str, str] | None) -> str:
    direction, module = position
    what = f"output of {module}" if direction == FORWARD else f"gradient of the output of {module}"
    right = f"; right before it: {before[1]}" if before is not None else ""
    after = f", after {differences[0].collective}" if differences[0].collective else ""
    return f"{what}, in {direction}, {_where(differences)}{after}{right}"


def _parameters(errors: Errors, label: str) -> list[str]:
    return [name.removeprefix(label) for name in errors if name.startswith(label)]


def _in_order(names: Iterable[str], modules: Sequence[str]) -> list[str]:
    """Names of parameters in the order in which ``modules`` has their modules."""
    places = {module: number for number, module in enumerate(modules)}

    def place(name: str) -> int:
        labels = name.split(".")
        owners = (".".join(labels[:n]) for n in range(len(labels) - 1, 0, -1))
        return next((places[owner] for owner in owners if owner in places), len(places))

    return sorted(names, key=place)
