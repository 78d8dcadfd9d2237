"""Why gradients differ: the combination of the micro-batches' gradients that reproduces them.

The run on one rank stores the gradient of each micro-batch. A wrong gradient of another run is often another sum of
them: with a factor, without some micro-batches, or with weights that follow from numbers of tokens. Each such
hypothesis is computed from the stored tensors and stated only if it reproduces the measured gradients.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from megatron_core.parallel.texts import listed
from megatron_core.verify.parts import Axis, Block, in_float64, possible_parts
from megatron_core.verify.whole_names import parameters_of

SEPARATION = 100.0
"""A hypothesis is stated only if its error is smaller than the measured difference by this factor."""


class GradientPair(NamedTuple):
    """A measured gradient, and the recorded gradients of the micro-batches of the same elements."""

    name: str
    measured: np.ndarray
    contributions: np.ndarray
    """[micro-batch, ...]"""


@dataclass(frozen=True)
class Division:
    """How the global batch is divided, with micro-batches by their place in the record."""

    tokens: Sequence[float]
    """Number of tokens of each micro-batch, or nothing if it is not known."""
    samples: Sequence[float]
    ranks: Sequence[Sequence[int]]
    """Micro-batches of each rank."""
    rank: int
    axes: Mapping[str, int]
    """Number of ranks of each axis."""
    averaged: int


class Contributions:
    """The gradients of each micro-batch in the run on one rank, and the measured gradients of another run."""

    def __init__(self) -> None:
        self.amounts: dict[int, tuple[float, float]] = {}
        """Numbers of tokens and samples of this rank's micro-batches, by their numbers."""
        self._arrays: dict[str, np.ndarray] = {}
        self._sums: dict[str, np.ndarray] = {}
        """Gradients of all micro-batches that have ended."""
        self._measured: list[tuple[str, np.ndarray, Block | None]] = []

    def begin(self, number: int, tokens: float, samples: float) -> None:
        """Begin a micro-batch."""
        self.amounts[number] = (tokens, samples)

    def add(self, models: Sequence[nn.Module]) -> None:
        """Copy the gradients of the micro-batch that ends."""
        if not self.amounts:
            return
        number = next(reversed(self.amounts))
        for name, parameter in parameters_of(models):
            gradient = getattr(parameter, "main_grad", None)  # where Megatron accumulates gradients
            gradient = parameter.grad if gradient is None else gradient
            if gradient is not None:
                total = in_float64(gradient)
                self._arrays.setdefault(f"{number}|{name}", total - self._sums.get(name, 0.0))
                self._sums[name] = total

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of the record: gradients by number and name, and amounts by number."""
        return self._arrays | {str(number): np.array(amount) for number, amount in self.amounts.items()}

    def measure(self, name: str, gradient: Tensor, block: Block | None) -> None:
        """Take a gradient of this run."""
        self._measured.append((name, in_float64(gradient), block))

    def pairs(
        self, arrays: Mapping[str, np.ndarray], recorded: Mapping[str, np.ndarray], axes: Mapping[str, Axis]
    ) -> tuple[list[GradientPair], dict[int, tuple[float, float]]]:
        """The measured gradients with their ``recorded`` contributions, and amounts of the record by number.

        Without micro-batches, or if their gradients do not add up to the recorded ones, such as with an optimizer that
        takes gradients away from parameters, the recorded gradient is the only contribution.
        """
        amounts = {int(key): (float(array[0]), float(array[1])) for key, array in arrays.items() if "|" not in key}
        chosen = {
            name: [arrays[f"{number}|{name}"] for number in amounts if f"{number}|{name}" in arrays]
            for name in recorded
        }
        complete = all(_adds_up(chosen[name], recorded[name]) for name, *_ in self._measured if name in recorded)
        if not amounts or not complete:
            amounts = {}
        pairs = []
        for name, measured, block in self._measured:
            if name not in recorded:
                continue
            zero = np.zeros_like(recorded[name])
            columns = [arrays.get(f"{number}|{name}", zero) for number in amounts] or [recorded[name]]
            choices = list(
                zip(*(possible_parts(column, measured.shape, axes, block) for column in columns), strict=True)
            )
            if choices:
                # Wrong gradients may be multiples, so that directions tell which part the rank has.
                best = max(choices, key=lambda choice: _likeness(measured, np.sum(choice, axis=0)))
                pairs.append(GradientPair(name, measured, np.stack(best)))
        return pairs, amounts

    def division(
        self,
        recorded: Mapping[int, tuple[float, float]],
        ranks: Sequence[Sequence[int]],
        rank: int,
        axes: Mapping[str, Axis],
        averaged: int,
    ) -> Division:
        """How the micro-batches of the record are divided among the ranks, by the numbers of each."""
        order = list(recorded)
        known = all(number in recorded for numbers in ranks for number in numbers)
        places = [[order.index(number) for number in numbers] for numbers in ranks] if order and known else []
        sizes = {name: size for name, (_, size) in axes.items()}
        tokens = [amount[0] for amount in recorded.values()]
        samples = [amount[1] for amount in recorded.values()]
        return Division(tokens, samples, places, rank, sizes, averaged)


def _adds_up(contributions: Sequence[np.ndarray], total: np.ndarray) -> bool:
    remaining = total - sum(contributions, np.zeros_like(total))
    return bool(np.abs(remaining).max(initial=0.0) <= 1e-5 * np.abs(total).max(initial=0.0))


def _likeness(x: np.ndarray, y: np.ndarray) -> float:
    """The cosine of the angle between two tensors."""
    scale = float(np.linalg.norm(x) * np.linalg.norm(y))
    return float(np.vdot(x, y)) / scale if scale else 0.0


class Hypothesis(NamedTuple):
    """A weight for each micro-batch, where 1 is right."""

    sentence: str
    weights: np.ndarray


def explain_gradients(pairs: Sequence[GradientPair], division: Division, bound: float) -> list[str]:
    """Sentences about the gradients that differ; [] if no combination of the recorded gradients reproduces them."""
    wrong = [pair for pair in pairs if _error([pair], np.ones(len(pair.contributions))) > bound]
    if not wrong:
        return []
    count = len(wrong[0].contributions)
    before = _error(wrong, np.ones(count))
    confirmed = [
        (hypothesis, error)
        for hypothesis in _hypotheses(division, count)
        if (error := _error(wrong, hypothesis.weights)) <= bound and error * SEPARATION <= before
    ]
    if not confirmed:
        fitted = _fitted(wrong)
        error = before if fitted is None else _error(wrong, fitted)
        if fitted is None or error > bound or error * SEPARATION > before:
            return _factors_by_name(wrong, bound, division)
        confirmed = [(Hypothesis(_weights_in_words(fitted, division), fitted), error)]
    subject = "all gradients" if len(wrong) == len(pairs) else f"gradients of {listed([pair.name for pair in wrong])}"
    # Several sentences are several possible causes, which these micro-batches and ranks cannot tell apart.
    return [_sentence(subject, hypothesis.sentence, before, error) for hypothesis, error in confirmed]


def _sentence(subject: str, explanation: str, before: float, after: float) -> str:
    return f"{subject}: {explanation}; with this the difference falls from {before:.1e} to {after:.1e}"


def _hypotheses(division: Division, count: int) -> Iterator[Hypothesis]:
    """The known combinations, the simplest first."""
    ones = np.ones(count)
    for size, label, larger, smaller in _sizes(division, count):
        yield Hypothesis(f"they are multiplied by {size}, the number of {label}: {larger}", ones * size)
        yield Hypothesis(f"they are divided by {size}, the number of {label}: {smaller}", ones / size)
    if count > 1:
        final = np.zeros(count)
        final[-1] = 1.0
        yield Hypothesis("only the final micro-batch counts", final)
    yield from _of_ranks(division, count)
    for name, amounts in (("tokens", division.tokens), ("samples", division.samples)):
        if len(amounts) == count and all(amounts):
            yield from _means_of_means(name, np.asarray(amounts, dtype=np.float64), division)
    if len(division.tokens) == count == len(division.samples) and all(division.tokens):
        tokens = np.asarray(division.tokens, dtype=np.float64)
        samples = np.asarray(division.samples, dtype=np.float64)
        weights = tokens.sum() * samples / samples.sum() / tokens
        yield Hypothesis(
            "each micro-batch is a mean over its tokens, and these means are weighted by their samples", weights
        )


def _sizes(division: Division, count: int) -> Iterator[tuple[int, str, str, str]]:
    """Numbers by which gradients may be multiplied: a name, and the causes of larger and of smaller gradients."""
    for name, size in division.axes.items():
        label = f"ranks of {name}"
        yield (
            size,
            label,
            "summed where they should be averaged, or twice",
            "averaged where they should not be, or twice",
        )
    local = len(division.ranks[division.rank]) if division.ranks else count
    for number in sorted({count, local} - {0, 1}):
        label = "micro-batches" if number == count else "micro-batches of a rank"
        yield number, label, "the loss is not divided by it", "the loss is divided by it a second time"


def _of_ranks(division: Division, count: int) -> Iterator[Hypothesis]:
    """This rank's micro-batches alone."""
    numbers = list(division.ranks[division.rank]) if division.ranks else []
    if not numbers or len(numbers) == count:
        return
    weights = np.zeros(count)
    weights[numbers] = 1.0
    sentence = f"rank {division.rank} has the gradients of its own micro-batches only: they are not summed over ranks"
    yield Hypothesis(sentence, weights)
    yield Hypothesis(f"{sentence}, nor divided by their number {division.averaged}", weights * division.averaged)
    yield Hypothesis(f"{sentence}, but divided by their number {len(division.ranks)}", weights / len(division.ranks))


def _means_of_means(name: str, amounts: np.ndarray, division: Division) -> Iterator[Hypothesis]:
    """Means of micro-batches, or of ranks, over different numbers of tokens that count equally."""
    if np.ptp(amounts) == 0.0:
        return
    total = amounts.sum()
    count = len(amounts)
    sentence = f"each micro-batch is divided by its own number of {name} ({listed(list(map(_short, amounts)))})"
    yield Hypothesis(f"{sentence}, and the means are averaged", total / count / amounts)
    yield Hypothesis(f"{sentence}, and the means are summed", total / amounts)
    if len(division.ranks) > 1:
        weights = total / len(division.ranks) / amounts
        yield Hypothesis(f"{sentence}, and the means are summed on each rank and averaged over ranks", weights)
    by_rank = np.zeros(count)
    totals = []
    for numbers in division.ranks:
        on_rank = amounts[list(numbers)].sum()
        totals.append(on_rank)
        by_rank[list(numbers)] = total / len(division.ranks) / on_rank if on_rank else 0.0
    if len(set(totals)) > 1 and by_rank.all():
        sentence = f"each rank divides by its own number of {name} ({listed(list(map(_short, totals)))})"
        yield Hypothesis(f"{sentence}, and the ranks are averaged", by_rank)
        yield Hypothesis(f"{sentence}, and the ranks are summed", by_rank * len(division.ranks))


def _fitted(pairs: Sequence[GradientPair]) -> np.ndarray | None:
    """The weights with the least squares; None if the micro-batches' gradients do not determine them."""
    columns = np.concatenate([pair.contributions.reshape(len(pair.contributions), -1) for pair in pairs], axis=1)
    target = np.concatenate([pair.measured.reshape(-1) for pair in pairs])
    if not np.isfinite(target).all():
        return None
    weights, _, rank, _ = np.linalg.lstsq(columns.T, target, rcond=1e-6)
    return weights if rank == len(columns) else None


def _weights_in_words(weights: np.ndarray, division: Division) -> str:
    """A sentence about weights that no known hypothesis has."""
    if np.allclose(weights, weights[0], rtol=1e-4, atol=1e-9):
        return f"all are {weights[0]:.4g} times the right value"
    missing = np.abs(weights) < 1e-6
    if missing.any() and np.allclose(weights[~missing], 1.0, rtol=1e-4):
        return f"the micro-batches {listed([str(number) for number in np.flatnonzero(missing)])} are missing"
    ratios = weights[1:] / weights[:-1] if weights[:-1].all() else np.zeros(0)
    # Two weights always have one ratio.
    if len(ratios) > 1 and np.allclose(ratios[1:], ratios[-1], rtol=1e-4):
        return f"each micro-batch multiplies the sum of those before it by {1 / ratios[-1]:.4g}"
    return f"the micro-batches count {listed([f'{weight:.4g}' for weight in weights])} times"


def _factors_by_name(wrong: Sequence[GradientPair], bound: float, division: Division) -> list[str]:
    """Sentences about parameters whose gradients are multiples of the right ones, each with its own factor."""
    by_factor: dict[str, list[GradientPair]] = {}
    for pair in wrong:
        total = pair.contributions.sum(0)
        squares = float(np.vdot(total, total))
        factor = float(np.vdot(total, pair.measured)) / squares if squares else 0.0
        weights = np.full(len(pair.contributions), factor)
        error = _error([pair], weights)
        if error <= bound and error * SEPARATION <= _error([pair], np.ones_like(weights)):
            by_factor.setdefault(f"{factor:.4g}", []).append(pair)
    lines = []
    for text, pairs in by_factor.items():
        factor = float(text)
        axes = [f"{name}={size}" for name, size in division.axes.items() if _is_size(factor, size)]
        reason = f", the number of ranks of {' or '.join(axes)} or its inverse" if axes else ""
        after = _error(pairs, np.full(len(pairs[0].contributions), factor))
        before = _error(pairs, np.ones(len(pairs[0].contributions)))
        names = listed([pair.name for pair in pairs])
        lines.append(
            _sentence(f"gradients of {names}", f"they are {text} times the right value{reason}", before, after)
        )
    return lines


def _is_size(factor: float, size: int) -> bool:
    return bool(np.isclose(factor, size, rtol=1e-4) or np.isclose(factor * size, 1.0, rtol=1e-4))


def _error(pairs: Sequence[GradientPair], weights: np.ndarray) -> float:
    """The largest error of the combination, relative to the largest element of each right gradient."""
    largest = 0.0
    for pair in pairs:
        scale = max(float(np.abs(pair.contributions.sum(0)).max(initial=0.0)), 1e-30)
        error = np.abs(pair.measured - np.tensordot(weights, pair.contributions, 1)).max(initial=0.0) / scale
        largest = max(largest, float(error) if np.isfinite(error) else np.inf)
    return largest


def _short(amount: float) -> str:
    return f"{amount:g}"
