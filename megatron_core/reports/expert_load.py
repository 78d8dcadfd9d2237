"""Recorded loads of experts, and experts with almost no tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_core.monitor.events import ExpertLoad

STARVED_SHARE, STARVED_STEPS = 0.05, 20
"""An expert starves if its load is below this share of the mean load in this number of consecutive steps."""


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
