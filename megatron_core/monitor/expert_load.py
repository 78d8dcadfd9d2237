"""How the tokens of a step are spread over the experts of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STARVED_SHARE, STARVED_STEPS = 0.05, 20
"""An expert starves if it has less than this share of the mean load for so many steps in a row."""


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one layer in one step, over the whole global batch."""

    tokens: tuple[int, ...]
    """How often each expert was chosen; of T tokens with k choices each the sum is T k."""
    dropped: int
    """Choices that the experts had no room for."""

    @classmethod
    def of(cls, numbers: Sequence[int]) -> ExpertLoad:
        """From the number for each expert and, last, the dropped ones."""
        return cls(tuple(numbers[:-1]), numbers[-1])

    @property
    def mean(self) -> float:
        """Tokens of an expert on average."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def max_over_mean(self) -> float:
        """The largest load over the mean one: 1 if all are equal, the number of experts if one gets everything."""
        return max(self.tokens) / self.mean if self.mean else 1.0

    @property
    def entropy(self) -> float:
        """Entropy of the shares over that of equal ones: 1 if all are equal, 0 if one expert gets everything."""
        shares = [n / sum(self.tokens) for n in self.tokens if n]
        if not shares or len(self.tokens) == 1:
            return 1.0
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens))

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "tokens": list(self.tokens),
            "dropped": self.dropped,
            "max_over_mean": self.max_over_mean,
            "entropy": self.entropy,
        }


def recorded_loads(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Of each step's record the load by layer, as far as steps have the layers and experts of the last one: a run may
    be continued with others."""
    found = [step["experts"] for step in steps if step.get("experts")]
    shapes = [{layer: len(load["tokens"]) for layer, load in loads.items()} for loads in found]
    return [loads for loads, shape in zip(found, shapes, strict=True) if shape == shapes[-1]]


class StarvedExperts:
    """Watches for experts that get all but no tokens for many steps; each is named once, until it recovers."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, int], int] = {}

    def after_step(self, loads: Mapping[int, Sequence[int]]) -> list[str]:
        """The experts that have just been starved for ``STARVED_STEPS`` steps, as ``layer 3: experts 5, 17``."""
        return list(self._sentences(loads))

    def _sentences(self, loads: Mapping[int, Sequence[int]]) -> Iterator[str]:
        for layer, numbers in loads.items():
            load, found = ExpertLoad.of(numbers), []
            for expert, tokens in enumerate(load.tokens):
                starves = tokens < STARVED_SHARE * load.mean
                self._steps[layer, expert] = self._steps.get((layer, expert), 0) + 1 if starves else 0
                if self._steps[layer, expert] == STARVED_STEPS:
                    found.append(str(expert))
            if found:
                yield f"layer {layer}: {'experts' if len(found) > 1 else 'expert'} {', '.join(found)}"
