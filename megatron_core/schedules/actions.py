"""What a pipeline rank does, as data: no torch here.

F is a stage's forward of a micro-batch, B its backward. A backward may be split: I computes the gradient of the
stage's input, which the stage before waits for; W computes the gradients of the weights, for which no rank waits.
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
    """One stage's F, B, I or W of a micro-batch, printed as ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The inverse of ``str``; ``LayoutError`` for what is no action."""
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise LayoutError(f"{text!r} is no pipeline action; write STAGE, F, B, I or W, MICRO-BATCH, as in 2F0")
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Plan:
    """Each pipeline rank's actions in order, and which rank holds which stage.

    The backward of a stage and micro-batch is one B, or an I and a W; a plan may have some of each.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    """``stage_to_rank[stage]`` is the pipeline rank that holds it. Neighbouring stages may lie on one rank."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.stage_to_rank)

    @cached_property
    def num_microbatches(self) -> int:
        """Micro-batches of the step: one more than the highest number in the plan."""
        return 1 + max((action.micro for actions in self.ranks for action in actions), default=-1)

    @cached_property
    def num_chunks(self) -> int:
        """Stages of the rank that holds most."""
        return max(self.stage_to_rank.count(rank) for rank in range(len(self.ranks)))

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """``chunks[stage]`` is the stage's number among its rank's stages, from 0."""
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

        F: the F of the stage before. B and I: the B or I of the stage behind; on the last stage its own F. W: its I.
        """
        if action.kind == "F":
            return Action(action.stage - 1, "F", action.micro) if action.stage else None
        if action.kind == "W":
            return Action(action.stage, "I", action.micro)
        last = action.stage == self.num_stages - 1
        return Action(action.stage, "F", action.micro) if last else self.backward(action.stage + 1, action.micro)

    def consumer(self, action: Action) -> Action | None:
        """The action of another stage that consumes the output of ``action``, if there is one; W has none."""
        if action.kind == "F":
            last = action.stage == self.num_stages - 1
            return None if last else Action(action.stage + 1, "F", action.micro)
        if action.kind == "W" or action.stage == 0:
            return None
        return self.backward(action.stage - 1, action.micro)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """All that has to be done before ``action``: for a backward its own forward, and its source."""
        forward = Action(action.stage, "F", action.micro) if action.kind in "BI" else None
        source = self.source(action)
        return tuple(need for need in dict.fromkeys((forward, source)) if need is not None)

    def messages(self, sender: int, receiver: int) -> list[Action]:
        """The actions of ``sender`` whose outputs ``receiver`` consumes, in the order in which they are sent.

        It is the order in which the receiver posts its receives, too. What goes from a stage to the next one on the
        same rank is no message.
        """
        return [action for action in self.ranks[sender] if self.receiver(action) == receiver]

    def receiver(self, action: Action) -> int | None:
        """The rank that the output of ``action`` is sent to; None if it stays here or has no consumer."""
        consumer = self.consumer(action)
        if consumer is None or self.stage_to_rank[consumer.stage] == self.stage_to_rank[action.stage]:
            return None
        return self.stage_to_rank[consumer.stage]

    def sender(self, action: Action) -> int | None:
        """The rank that the input of ``action`` comes from; None if it is on this rank already."""
        source = self.source(action)
        if source is None or self.stage_to_rank[source.stage] == self.stage_to_rank[action.stage]:
            return None
        return self.stage_to_rank[source.stage]

    @cached_property
    def receive_lookahead(self) -> int:
        """How many actions before it is needed a receive must be posted so that sends that block cannot lock the ranks.

        For each ordered pair of ranks there is one link, whose messages arrive in the order in which they were sent. A
        rank runs its list in order. Before it runs action i it has posted the receives of all messages that actions i
        to i + a need, and of those that their senders send before them (``messages``). An action runs when its messages
        are there; then its output is sent. With overlap no send holds a rank up, and a sound plan runs with any a.
        Without it a rank goes on when the receive of what it sends has been posted: two ranks that send to each other,
        and would each post the other's receive afterwards, wait forever. This is the smallest a with which a sound plan
        runs; there is one, because no send blocks if all receives are posted at the beginning. GPipe needs 0, 1F1B and
        ZB-H1 at most 1, interleaved, ZB-H2 and DualPipeV 2, ZB-V 3.
        """
        return next(lookahead for lookahead in count() if _runs_with_blocking_sends(self, lookahead))

    @cached_property
    def steps(self) -> tuple[tuple[int, Action, tuple[tuple[Action, bool], ...]], ...]:
        """``walk``, with what each action needs and whether that is on the same rank."""
        where = self.stage_to_rank
        return tuple(
            (rank, action, tuple((need, where[need.stage] == rank) for need in self.needs(action)))
            for rank, action in self.walk()
        )

    def walk(self) -> Iterator[tuple[int, Action]]:
        """(rank, action) in an order that keeps every rank's list and every dependency.

        It ends early if no rank can go on: those that are left wait for one another.
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
    """Whether every rank comes to the end of its list: see ``Plan.receive_lookahead``."""
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
    """Stage s on rank s mod p: rank r's chunk c is stage c p + r (Narayanan et al. 2021, section 2.2)."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def v_shaped_stages(num_ranks: int) -> tuple[int, ...]:
    """Rank r holds stages r and 2p - 1 - r, so that the middle's two neighbours p - 1 and p lie on one rank.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).
    """
    return (*range(num_ranks), *range(num_ranks - 1, -1, -1))


def parse_plan(lines: Iterable[str], stage_to_rank: tuple[int, ...]) -> Plan:
    """A plan from one line of actions for each rank (``0F0 0F1 0B0 0B1``)."""
    return Plan(tuple(tuple(Action.parse(word) for word in line.split()) for line in lines), stage_to_rank)
