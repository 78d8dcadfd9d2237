"""What a pipeline rank does, as data: no torch here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_core.errors import LayoutError

_PATTERN = re.compile(r"(\d+)([FB])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """One stage's forward (``F``) or backward (``B``) of a micro-batch, printed as ``2F0``: stage 2, micro-batch 0."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise LayoutError(f"{text!r} is no pipeline action; write STAGE, F or B, MICRO-BATCH, as in 2F0")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Plan:
    """Each pipeline rank's actions in order, and which rank holds which stage."""

    ranks: tuple[tuple[Action, ...], ...]
    place: tuple[int, ...]
    """``place[stage]`` is the pipeline rank that holds it."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.place)

    def source(self, action: Action) -> Action | None:
        """The action on another stage whose output ``action`` consumes; None for the first stage's forward.

        The last stage's backward consumes its own forward.
        """
        if action.kind == "F":
            return Action(action.stage - 1, "F", action.micro) if action.stage else None
        last = action.stage == self.num_stages - 1
        return Action(action.stage, "F", action.micro) if last else Action(action.stage + 1, "B", action.micro)

    def consumer(self, action: Action) -> Action | None:
        """The action on another stage that consumes the output of ``action``, if there is one."""
        if action.kind == "F":
            last = action.stage == self.num_stages - 1
            return None if last else Action(action.stage + 1, "F", action.micro)
        return Action(action.stage - 1, "B", action.micro) if action.stage else None

    def messages(self, sender: int, receiver: int) -> list[Action]:
        """The actions of ``sender`` whose outputs ``receiver`` consumes, in the order in which they are sent."""
        return [action for action in self.ranks[sender] if self._goes_to(action, receiver)]

    def _goes_to(self, action: Action, receiver: int) -> bool:
        consumer = self.consumer(action)
        return consumer is not None and self.place[consumer.stage] == receiver != self.place[action.stage]


def placed_round_robin(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod p: rank r's chunk c is stage c p + r (Narayanan et al. 2021, section 2.2)."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def parse_plan(lines: Iterable[str], place: tuple[int, ...]) -> Plan:
    """A plan from one line of actions for each rank (``0F0 0F1 0B0 0B1``)."""
    return Plan(tuple(tuple(Action.parse(word) for word in line.split()) for line in lines), place)
