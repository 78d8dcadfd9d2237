"""Seconds by kind of forward and backward of a part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

Seconds = dict[str, float]
"""Seconds by kind: products, attention, elements, launches; exposed communication by axis: tp, cp, ep; host."""


def total(parts: Iterable[Seconds]) -> Seconds:
    """Sum by kind."""
    found: Seconds = {}
    for part in parts:
        for kind, seconds in part.items():
            found[kind] = found.get(kind, 0.0) + seconds
    return found


@dataclass(frozen=True)
class Passes:
    """Times of forward and backward of a part of the model."""

    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    hidden: float = 0.0
    """Seconds of communication that overlap with the weight gradient if backward is not split."""

    @cached_property
    def sums(self) -> tuple[float, float, float]:
        """Seconds of forward, input gradient and weight gradient."""
        return sum(self.forward.values()), sum(self.input_grad.values()), sum(self.weight_grad.values())

    @staticmethod
    def sum(parts: Iterable[Passes]) -> Passes:
        """Sum of parts that run one after another."""
        parts = list(parts)
        return Passes(
            total(p.forward for p in parts),
            total(p.input_grad for p in parts),
            total(p.weight_grad for p in parts),
            sum(p.hidden for p in parts),
        )
