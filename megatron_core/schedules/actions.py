"""Actions of pipeline ranks, and plans of actions, as data: no torch here.

F is a stage's forward of a micro-batch, B its backward. A backward may be split: I computes the gradient of the
stage's input, which the previous stage needs; W computes the gradients of the weights, which no other rank needs.
Source of the split: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 1, where I is called B.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from megatron_core.errors import LayoutError

_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, order=True)
class Action:
    """F, B, I or W of one micro-batch in one stage, printed as ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``; ``LayoutError`` if ``text`` is not an action."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise LayoutError(
                f"{text!r} is not a pipeline action; write STAGE, then F, B, I or W, then MICRO-BATCH, as in 2F0"
            )
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Plan:
    """Each pipeline rank's actions in order, and the rank of each stage.

    The backward of a stage and micro-batch is either one B, or an I and a W; a plan may contain both forms.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    """``stage_to_rank[stage]`` is the pipeline rank of the stage. Neighbouring stages may be on the same rank."""

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole model."""
        return len(self.stage_to_rank)

    @cached_property
    def num_microbatches(self) -> int:
        """Number of micro-batches of the step: one more than the highest number in the plan."""
        return 1 + max((action.micro for actions in self.ranks for action in actions), default=-1)

    @cached_property
    def num_chunks(self) -> int:
        """Maximal number of stages on a rank."""
        return max(self.stage_to_rank.count(rank) for rank in range(len(self.ranks)))

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """``chunks[stage]`` is the stage's index among the stages of its rank, from 0."""
        return tuple(self.stage_to_rank[:stage].count(rank) for stage, rank in enumerate(self.stage_to_rank))

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) of every split backward."""
        return frozenset((a.stage, a.micro) for actions in self.ranks for a in actions if a.kind == "I")

    def backward(self, stage: int, micro: int) -> Action:
        """The action that computes the gradient of a stage's input: its I if the backward is split, else its B."""
        return Action(stage, "I" if (stage, micro) in self._split else "B", micro)

    def source(self, action: Action) -> Action | None:
        """The action whose output ``action`` consumes; None for the first stage's forward.

        F: the F of the previous stage. B and I: the B or I of the next stage; on the last stage its F. W: its I.
        """
        if action.kind == "F":
            return Action(action.stage - 1, "F", action.micro) if action.stage else None
        if action.kind == "W":
            return Action(action.stage, "I", action.micro)
        last = action.stage == self.num_stages - 1
        return Action(action.stage, "F", action.micro) if last else self.backward(action.stage + 1, action.micro)

    def consumer(self, action: Action) -> Action | None:
        """The action of another stage that consumes the output of ``action``; None if there is none, as for W."""
        if action.kind == "F":
            last = action.stage == self.num_stages - 1
            return None if last else Action(action.stage + 1, "F", action.micro)
        if action.kind == "W" or action.stage == 0:
            return None
        return self.backward(action.stage - 1, action.micro)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """The actions that must precede ``action``: its source, and for a backward also its own forward."""
        forward = Action(action.stage, "F", action.micro) if action.kind in "BI" else None
        source = self.source(action)
        return tuple(need for need in dict.fromkeys((forward, source)) if need is not None)

    def messages(self, sender: int, receiver: int) -> list[Action]:
        """The actions of ``sender`` whose outputs ``receiver`` consumes, in the order of sending.

        The receiver posts its receives in the same order. Outputs between two stages of the same rank are not messages.
        """
        return [action for action in self.ranks[sender] if self.receiver(action) == receiver]

    def receiver(self, action: Action) -> int | None:
        """The rank that the output of ``action`` is sent to; None if the consumer is on the same rank or missing."""
        consumer = self.consumer(action)
        if consumer is None or self.stage_to_rank[consumer.stage] == self.stage_to_rank[action.stage]:
            return None
        return self.stage_to_rank[consumer.stage]

    def sender(self, action: Action) -> int | None:
        """The rank that sends the input of ``action``; None if the input is computed on the same rank or missing."""
        source = self.source(action)
        if source is None or self.stage_to_rank[source.stage] == self.stage_to_rank[action.stage]:
            return None
        return self.stage_to_rank[source.stage]

    @cached_property
    def receive_lookahead(self) -> int:
        """Smallest lookahead of receives, in actions, at which blocking sends cannot deadlock.

        Each ordered pair of ranks has one link, which delivers messages in the order of sending. A rank runs its list
        in order. Before action i it posts the receives of all messages that actions i to i + a need, and of all earlier
        messages from the same senders (``messages``); a is the lookahead. An action runs when its messages have
        arrived; then its output is sent. With overlap sends do not block, and a valid plan runs with any a. Without
        overlap a send blocks until its receive is posted: two ranks deadlock if they send to each other and each posts
        its receive after its send. A smallest a exists, because no send blocks if all receives are posted at the
        beginning. GPipe needs 0, 1F1B and ZB-H1 at most 1, interleaved, ZB-H2 and DualPipeV 2, ZB-V 3.
        """
        return next(lookahead for lookahead in count() if _runs_with_blocking_sends(self, lookahead))

    @cached_property
    def steps(self) -> tuple[tuple[int, Action, tuple[tuple[Action, bool], ...]], ...]:
        """``walk``, and for each action its dependencies with a flag: whether the dependency is on the same rank."""
        where = self.stage_to_rank
        return tuple(
            (rank, action, tuple((need, where[need.stage] == rank) for need in self.needs(action)))
            for rank, action in self.walk()
        )

    def walk(self) -> Iterator[tuple[int, Action]]:
        """Yield (rank, action) in an order that respects every rank's list and every dependency.

        In a deadlock the iterator ends before all actions have been yielded.
        """
        done: set[Action] = set()
        waiting: dict[Action, list[int]] = {}
        position = [0] * len(self.ranks)
        ready = deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            actions = self.ranks[rank]
            while position[rank] < len(actions):
                action = actions[position[rank]]
                missing = next((need for need in self.needs(action) if need not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                done.add(action)
                position[rank] += 1
                ready.extend(waiting.pop(action, ()))
                yield rank, action


def _runs_with_blocking_sends(plan: Plan, lookahead: int) -> bool:
    """Whether every rank reaches the end of its list: see ``Plan.receive_lookahead``."""
    ranks = range(len(plan.ranks))
    links = (plan.messages(sender, receiver) for sender in ranks for receiver in ranks)
    number = {message: at for messages in links for at, message in enumerate(messages)}
    posted: defaultdict[tuple[int, int], int] = defaultdict(int)  # receives by sender and receiver
    done: set[Action] = set()
    position = [0] * len(plan.ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(plan.ranks):
            while position[rank] < len(actions):
                at, action = position[rank], actions[position[rank]]
                for early in actions[at : at + 1 + lookahead]:
                    source, sender = plan.source(early), plan.sender(early)
                    if source is not None and sender is not None:
                        posted[sender, rank] = max(posted[sender, rank], number[source] + 1)
                if action not in done:
                    if not done.issuperset(plan.needs(action)):
                        break
                    done.add(action)
                    progress = True
                receiver = plan.receiver(action)
                if receiver is not None and posted[rank, receiver] <= number[action]:
                    break
                position[rank] += 1
                progress = True
    return all(at == len(actions) for at, actions in zip(position, plan.ranks, strict=True))


def round_robin_stages(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Put stage s on rank s mod p: rank r's chunk c is stage c p + r (Narayanan et al. 2021, section 2.2)."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def v_shaped_stages(num_ranks: int) -> tuple[int, ...]:
    """Put stages r and 2p - 1 - r on rank r, so that the two middle stages p - 1 and p are on the same rank.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).
    """
    return (*range(num_ranks), *range(num_ranks - 1, -1, -1))


def parse_plan(lines: Iterable[str], stage_to_rank: tuple[int, ...]) -> Plan:
    """Parse a plan from one line of actions for each rank (``0F0 0F1 0B0 0B1``)."""
    return Plan(tuple(tuple(Action.parse(word) for word in line.split()) for line in lines), stage_to_rank)
