"""Distribution of the tokens of a step over the experts of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STARVED_SHARE, STARVED_STEPS = 0.05, 20
"""An expert starves if its load is below this share of the mean load in this number of consecutive steps."""


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one layer in one step, over the whole global batch."""

    tokens: tuple[int, ...]
    """Number of times each expert was chosen; the sum is T k for T tokens with k choices each."""
    dropped: int
    """Number of choices dropped because the expert was at capacity."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> ExpertLoad:
        """Create from the number for each expert, followed by the number of dropped choices."""
        return cls(tuple(numbers[:-1]), numbers[-1])

    @property
    def mean(self) -> float:
        """Mean number of tokens of an expert."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def max_over_mean(self) -> float:
        """Largest load / mean load: 1 if all are equal, the number of experts if one expert gets all tokens."""
        return max(self.tokens) / self.mean if self.mean else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the shares / entropy of equal shares: 1 if all are equal, 0 if one expert gets all tokens."""
        shares = [n / sum(self.tokens) for n in self.tokens if n]
        if not shares or len(self.tokens) == 1:
            return 1.0
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens))

    def record(self) -> dict[str, Any]:
        """Return the fields of the JSON record."""
        return {
            "tokens": list(self.tokens),
            "dropped": self.dropped,
            "max_over_mean": self.max_over_mean,
            "entropy": self.entropy,
        }


def recorded_loads(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Return the load by layer of each step with the same layers and experts as the last step.

    A run may be continued with other layers or experts.
    """
    recorded = [step["experts"] for step in steps if step.get("experts")]
    shapes = [{layer: len(load["tokens"]) for layer, load in loads.items()} for loads in recorded]
    return [loads for loads, shape in zip(recorded, shapes, strict=True) if shape == shapes[-1]]


class StarvedExperts:
    """Detects experts with almost no tokens in many consecutive steps; each is reported once until it recovers."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], int] = {}

    def after_step(self, loads: Mapping[int, Sequence[int]]) -> list[str]:
        """Return experts that starved for ``STARVED_STEPS`` steps up to this one, as ``layer 3: experts 5, 17``."""
        return list(self._sentences(loads))

    def _sentences(self, loads: Mapping[int, Sequence[int]]) -> Iterator[str]:
        for layer, numbers in loads.items():
            load, starved = ExpertLoad.of(numbers), []
            for expert, tokens in enumerate(load.tokens):
                starves = tokens < STARVED_SHARE * load.mean
                self._steps[layer, expert] = self._steps.get((layer, expert), 0) + 1 if starves else 0
                if self._steps[layer, expert] == STARVED_STEPS:
                    starved.append(str(expert))
            if starved:
                yield f"layer {layer}: {'experts' if len(starved) > 1 else 'expert'} {', '.join(starved)}"
