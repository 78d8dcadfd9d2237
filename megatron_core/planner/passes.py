"""Seconds by kind of forward and backward of a part of the model."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

Seconds = dict[str, float]
"""Seconds by kind: products, attention, elements, launches; exposed communication by axis: tp, cp, ep; host."""


def total(terms: Iterable[Seconds]) -> Seconds:
    """Sum by kind."""
    sums: Seconds = {}
    for term in terms:
        for category, seconds in term.items():
            sums[category] = sums.get(category, 0.0) + seconds
    return sums


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
    def sum(terms: "Iterable[Passes]") -> "Passes":
        """Sum of parts that run one after another."""
        terms = list(terms)
        return Passes(
            total(p.forward for p in terms),
            total(p.input_grad for p in terms),
            total(p.weight_grad for p in terms),
            sum(p.hidden for p in terms),
        )
