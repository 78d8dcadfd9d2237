"""The rule by which a program's optimizer changes weights, computed from measured weights and gradients.

``UpdateWatch`` copies weights and gradients around each ``optimizer.step`` of any program. It computes the update of
the intended rule from the measured gradients, and that of each known deviation. A deviation is named only if it
reproduces the measured weights and the intended rule does not.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import sqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_core.errors import DataError
from megatron_core.parallel.texts import listed
from megatron_core.verify.explanations import SEPARATION
from megatron_core.verify.parts import in_float64
from megatron_core.verify.whole_names import parameters_of

DEFAULT_NORM = 1.0
"""The norm to which DeepSpeed and the Trainer of transformers clip by default."""
SMALLEST_STEP = 1e-3
"""A step with a rate of 0 changes nothing: errors are relative to at least this share of the largest change."""
ArraysByName = Mapping[str, np.ndarray]
RULE_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest error of a confirmed rule, relative to the largest change of a weight in a step, by the dtype of moments."""


@dataclass(frozen=True)
class AdamRule:
    """AdamW with the settings that a program should have; the last fields describe deviations."""

    rates: Sequence[float]
    """Learning rate of each step."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decays: Callable[[str, np.ndarray], bool] = field(default=lambda _, weight: weight.ndim > 1)
    """Whether a parameter, by its name and value, has weight decay."""
    max_norm: float = 0.0
    """Norm to which gradients are clipped; 0: not clipped."""
    shards: int = 1
    """Number of ranks over which FSDP2 splits the first dimension of parameters."""
    norm_of: str = "model"
    """Norm that clips a gradient: of the ``model``, of the ``parameter``, or of the ``shard`` of each rank."""
    eps_in_root: bool = False
    corrects_bias: bool = True
    adds_decay_to_gradient: bool = False
    counts: str = "own"
    """Steps in the bias correction: ``own`` updates of the parameter, ``all`` steps, or the count of the ``final``
    parameter that has a gradient, the only one that advances."""
    restarts: int = 0
    """Step before which the moments are set to 0 again."""


class MeasuredStep(NamedTuple):
    """A step of the program; a parameter without a gradient is not in ``gradients``."""

    before: ArraysByName
    gradients: ArraysByName
    after: ArraysByName


class Deviation(NamedTuple):
    """A difference from the intended rule."""

    sentence: str
    changes: dict[str, Any]


class RuleFit(NamedTuple):
    """How well a rule reproduces the measured weights."""

    deviations: tuple[Deviation, ...]
    error: float
    rates: list[float]
    """Measured learning rates; [] if those of the rule were used."""


class UpdateWatch:
    """Measure the steps of a program's optimizer."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        rule: AdamRule,
        *,
        gradient: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.grad,
        weight: Callable[[nn.Parameter], Tensor] = lambda parameter: parameter,
    ) -> None:
        """``gradient`` and ``weight`` return the whole tensors of a parameter, such as DeepSpeed's
        ``safe_get_full_grad`` and ``safe_get_full_fp32_param``; DTensors are gathered here.
        """
        self._models = [model] if isinstance(model, nn.Module) else list(model)
        self._rule = rule
        self._gradient = gradient
        self._weight = weight
        self._before: ArraysByName = {}
        self._gradients: ArraysByName = {}
        self._dtype = torch.float64
        self.steps: list[MeasuredStep] = []

    def before_step(self) -> None:
        """Copy weights and gradients after gradients are summed over ranks, before they are clipped."""
        named = list(parameters_of(self._models))
        gradients = {name: self._gradient(parameter) for name, parameter in named}
        self._gradients = {name: in_float64(value) for name, value in gradients.items() if value is not None}
        self._before = self._weights()

    def after_step(self) -> None:
        """Copy the weights after the optimizer's step."""
        self.steps.append(MeasuredStep(self._before, self._gradients, self._weights()))

    def explain(self) -> list[str]:
        """Sentences about the deviation from the rule; [] if the optimizer follows it.

        Errors: ``DataError`` if no step changed a weight.
        """
        return explain_updates(self.steps, self._rule, self._dtype)

    def _weights(self) -> ArraysByName:
        values = {name: self._weight(parameter) for name, parameter in parameters_of(self._models)}
        if any(value.dtype != torch.float64 for value in values.values()):
            self._dtype = torch.float32
        return {name: in_float64(value) for name, value in values.items()}


def explain_updates(steps: Sequence[MeasuredStep], rule: AdamRule, dtype: torch.dtype = torch.float64) -> list[str]:
    """Sentences about the deviations from ``rule`` that reproduce the measured weights; [] without deviations."""
    if len(rule.rates) < len(steps):
        raise DataError(f"rates has {len(rule.rates)} values for {len(steps)} steps; give the rate of each step")
    if not any(_largest_change(step) for step in steps):
        raise DataError("no weight changed in any measured step: call after_step after the optimizer's step")
    tolerance = RULE_TOLERANCES[dtype] + max(_rounding(step, dtype) for step in steps)
    intended = fit_rule(steps, rule)
    if intended.error <= tolerance:
        return []
    fits = [intended]
    for deviations in _combinations(steps, rule):
        changes = {name: value for deviation in deviations for name, value in deviation.changes.items()}
        changed = replace(rule, **changes)
        fits += [fit_rule(steps, changed, deviations), fit_rule(steps, changed, deviations, measures_rates=True)]
    confirmed = [fit for fit in fits if fit.error <= tolerance and fit.error * SEPARATION <= intended.error]
    before = intended.error
    if not confirmed:
        after = min(fit.error for fit in fits)
        return [f"the update differs from AdamW by {before:.1e}; no known deviation explains it (at best {after:.1e})"]
    fewest = min(_complexity(fit) for fit in confirmed)
    chosen = [fit for fit in confirmed if _complexity(fit) == fewest]
    falls = "with this the difference from AdamW falls from"
    return [f"update: {_sentence(fit, rule)}; {falls} {before:.1e} to {fit.error:.1e}" for fit in chosen]


def fit_rule(
    steps: Sequence[MeasuredStep],
    rule: AdamRule,
    deviations: tuple[Deviation, ...] = (),
    *,
    measures_rates: bool = False,
) -> RuleFit:
    """The largest error of the changes that ``rule`` computes from the measured weights and gradients.

    Each step begins with the measured weights, so that errors do not accumulate. Every variant's change is proportional
    to the learning rate; ``measures_rates`` takes the one with the least squares instead of the rule's.
    """
    moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    counts = Counter[str]()
    final_counts = Counter[str]()
    error = 0.0
    least = SMALLEST_STEP * max(map(_largest_change, steps))
    rates = []
    for number, step in enumerate(steps):
        if number == rule.restarts:
            moments.clear()
            counts.clear()
        final = list(step.gradients)[-1] if step.gradients else ""
        counts.update(step.gradients.keys())
        final_counts[final] += 1
        by_rule = {"own": counts, "final": dict.fromkeys(counts, final_counts[final])}
        by_rule["all"] = dict.fromkeys(counts, number + 1)
        direction = _directions(step, rule, moments, by_rule[rule.counts])
        change = {name: step.after[name] - step.before[name] for name in step.before}
        rate = rule.rates[number]
        if measures_rates:
            along = sum(float(np.vdot(direction[name], change[name])) for name in direction)
            squares = sum(float(np.vdot(value, value)) for value in direction.values())
            rate = -along / squares if squares else 0.0
        rates.append(rate + 0.0)  # not -0
        largest = max(_largest_change(step), least)
        for name, value in change.items():
            remaining = value + rate * direction[name] if name in direction else value
            error = max(error, float(np.abs(remaining).max(initial=0.0)) / largest)
    return RuleFit(deviations, error if np.isfinite(error) else np.inf, rates if measures_rates else [])


def _directions(
    step: MeasuredStep,
    rule: AdamRule,
    moments: dict[str, tuple[np.ndarray, np.ndarray]],
    counts: Mapping[str, int],
) -> ArraysByName:
    """The change of each weight for a learning rate of -1; updates the moments."""
    clipped = _clipped(step.gradients, rule)
    first_beta, second_beta = rule.betas
    directions = {}
    for name in step.gradients:
        weight = step.before[name]
        decay = rule.weight_decay * rule.decays(name, weight)
        gradient = clipped[name] + (decay * weight if rule.adds_decay_to_gradient else 0.0)
        mean, square = moments.get(name, (np.zeros_like(weight), np.zeros_like(weight)))
        mean = first_beta * mean + (1 - first_beta) * gradient
        square = second_beta * square + (1 - second_beta) * gradient**2
        moments[name] = (mean, square)
        count = counts[name]
        if rule.corrects_bias:
            mean = mean / (1 - first_beta**count)
            square = square / (1 - second_beta**count)
        root = np.sqrt(square + rule.eps) if rule.eps_in_root else np.sqrt(square) + rule.eps
        directions[name] = mean / root + (0.0 if rule.adds_decay_to_gradient else decay * weight)
    return directions


def _clipped(gradients: ArraysByName, rule: AdamRule) -> ArraysByName:
    if not rule.max_norm:
        return gradients
    count = rule.shards if rule.norm_of == "shard" else 1
    # As torch.chunk: the final shards may be smaller, or empty.
    pieces = {name: _chunks(value, count) for name, value in gradients.items()}
    squares = {name: [float(np.vdot(piece, piece)) for piece in chunks] for name, chunks in pieces.items()}
    totals = [sum(sums[shard] for sums in squares.values()) for shard in range(count)]
    clipped = {}
    for name, chunks in pieces.items():
        sums = squares[name] if rule.norm_of == "parameter" else totals
        factors = [min(1.0, rule.max_norm / (sqrt(total) + 1e-6)) for total in sums]
        scaled = [chunk * factor for chunk, factor in zip(chunks, factors, strict=True)]
        clipped[name] = np.concatenate(scaled) if count > 1 else scaled[0]
    return clipped


def _chunks(value: np.ndarray, count: int) -> list[np.ndarray]:
    if count == 1:
        return [value]
    length = -(-len(value) // count)
    return [value[number * length : (number + 1) * length] for number in range(count)]


def _known_deviations(steps: Sequence[MeasuredStep], rule: AdamRule) -> Iterator[Deviation]:
    """The deviations that can be told from the rule by its settings and by the measured steps."""
    weights = steps[0].before
    yield Deviation("eps is added inside the square root", {"eps_in_root": True})
    yield Deviation("the moments are not corrected for their start at 0", {"corrects_bias": False})
    if rule.betas[0] != rule.betas[1]:
        yield Deviation("the two betas are exchanged", {"betas": rule.betas[::-1]})
    if rule.weight_decay:
        decayed = {name for name, weight in weights.items() if rule.decays(name, weight)}
        spared = [name for name in weights if name not in decayed]
        yield Deviation("the weight decay is part of the gradient (L2), not of the update", _L2)
        yield Deviation("no parameter has weight decay", {"weight_decay": 0.0})
        if spared:
            sentence = f"weight decay also changes {listed(spared)}, which should have none"
            yield Deviation(sentence, {"decays": lambda *_: True})
        vectors = [name for name in decayed if weights[name].ndim < 2]
        if vectors:
            sentence = f"weight decay leaves out {listed(sorted(vectors))}"
            yield Deviation(sentence, {"decays": lambda name, weight: weight.ndim > 1 and rule.decays(name, weight)})
    if rule.max_norm != DEFAULT_NORM:
        expected = f"instead of {rule.max_norm:g}" if rule.max_norm else "although they should not be clipped"
        yield Deviation(f"gradients are clipped to a norm of {DEFAULT_NORM:g} {expected}", {"max_norm": DEFAULT_NORM})
    if rule.max_norm:
        yield Deviation("gradients are not clipped", {"max_norm": 0.0})
        sentence = "each gradient is clipped by its own norm instead of the norm of all"
        yield Deviation(sentence, {"norm_of": "parameter"})
        if rule.shards > 1:
            sentence = "each rank clips its shards by their own norm instead of the norm of all"
            yield Deviation(sentence, {"norm_of": "shard"})
    if any(step.gradients.keys() != steps[0].gradients.keys() for step in steps):
        sentence = "the bias correction of all parameters takes the step count of the final one with a gradient"
        yield Deviation(sentence, {"counts": "final"})
        sentence = "the bias correction counts all steps, also those without a gradient of the parameter"
        yield Deviation(sentence, {"counts": "all"})
    for number in range(1, len(steps)):
        yield Deviation(f"the moments start at 0 again in step {number + 1}", {"restarts": number})


_L2 = {"adds_decay_to_gradient": True}


def _combinations(steps: Sequence[MeasuredStep], rule: AdamRule) -> Iterator[tuple[Deviation, ...]]:
    known = list(_known_deviations(steps, rule))
    yield ()
    for count in (1, 2):
        for deviations in combinations(known, count):
            if len({name for deviation in deviations for name in deviation.changes}) == count:
                yield deviations


def _complexity(fit: RuleFit) -> int:
    """The number of deviations; measured rates count as two, because they are one number for each step."""
    return len(fit.deviations) + 2 * bool(fit.rates)


def _sentence(fit: RuleFit, rule: AdamRule) -> str:
    sentences = [deviation.sentence for deviation in fit.deviations]
    if fit.rates:
        sentences.append(_rates_in_words(fit.rates, list(rule.rates)))
    return " and ".join(sentences)


def _rates_in_words(measured: list[float], rates: list[float]) -> str:
    """How the measured learning rates differ from the rule's."""
    count = len(measured)
    listing = f"learning rates are {listed([f'{rate:.4g}' for rate in measured])}"
    listing += f" instead of {listed([f'{rate:.4g}' for rate in rates[:count]])}"
    ratios = [rate / intended for rate, intended in zip(measured, rates, strict=False) if intended]
    if len(ratios) == count and _close(ratios, [ratios[0]] * count):
        return f"{listing}: {ratios[0]:.4g} times"
    if count > 1 and _close(measured[1:], rates[: count - 1]):
        return f"{listing}: one step late"
    if _close(measured, rates[1 : count + 1]):
        return f"{listing}: one step early"
    for stride in range(2, len(rates) + 1):
        if count > 1 and _close(measured, rates[::stride][:count]):
            return f"{listing}: the schedule advances {stride} times in a step"
        if count > 1 and _close(measured, rates[stride - 1 :: stride][:count]):
            return f"{listing}: the schedule advances {stride} times in a step, before the update"
    return listing


def _close(measured: Sequence[float], expected: Sequence[float]) -> bool:
    return len(measured) == len(expected) and bool(np.allclose(measured, expected, rtol=1e-4, atol=0.0))


def _largest_change(step: MeasuredStep) -> float:
    return max(float(np.abs(step.after[name] - step.before[name]).max(initial=0.0)) for name in step.before)


def _rounding(step: MeasuredStep, dtype: torch.dtype) -> float:
    """Rounding errors of stored weights, relative to the largest change."""
    largest = max(float(np.abs(weight).max(initial=0.0)) for weight in step.after.values())
    change = _largest_change(step)
    return 4.0 * torch.finfo(dtype).eps * largest / change if change else 0.0
