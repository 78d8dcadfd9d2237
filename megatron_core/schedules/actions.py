"""Actions of pipeline ranks, and plans of actions, as data: no torch here.

F is a stage's forward of a micro-batch, B its backward. A backward may be split: I computes the gradient of the
stage's input, which the previous stage needs; W computes the gradients of the weights, which no other rank needs.
Source of the split: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 1, where I is called B. A forward and
a B of different micro-batches may run together, as a pair.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count


@dataclass(frozen=True, order=True)
class Action:
    """F, B, I or W of one micro-batch in one stage, printed as ``2F0``: stage 2, forward, micro-batch 0."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


@dataclass(frozen=True)
# Tuples of actions and nothing else: a plan can be checked, simulated, drawn, stored in a file and compared.
class Plan:
    """Each pipeline rank's actions in order, and the rank of each stage.

    The backward of a stage and micro-batch is either one B, or an I and a W; a plan may contain both forms.
    """

    ranks: tuple[tuple[Action, ...], ...]
    stage_to_rank: tuple[int, ...]
    """``stage_to_rank[stage]`` is the pipeline rank of the stage. Neighbouring stages may be on the same rank."""
    paired: frozenset[Action] = frozenset()
    """Forwards that run together with the next action of their rank, the B of another micro-batch.

    Both start when the inputs of both have arrived; the computation of one hides the communication of the other.
    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1.
    """

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
    def turns(self) -> tuple[tuple[tuple[Action, ...], ...], ...]:
        """Each rank's actions in the order in which they run: a turn is one action, or a forward and its B."""
        return tuple(tuple(_turns(actions, self.paired)) for actions in self.ranks)

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
        is_last = action.stage == self.num_stages - 1
        return Action(action.stage, "F", action.micro) if is_last else self.backward(action.stage + 1, action.micro)

    def consumer(self, action: Action) -> Action | None:
        """The action of another stage that consumes the output of ``action``; None if there is none, as for W."""
        if action.kind == "F":
            is_last = action.stage == self.num_stages - 1
            return None if is_last else Action(action.stage + 1, "F", action.micro)
        # The gradient of the model's input has no reader.
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

        Before action i a rank posts the receives of all messages that actions i to i + a need, and of all earlier
        messages from the same senders (``messages``); a is the lookahead. The actions of a pair count as one.
        """
        # Without overlap a send blocks until its receive is posted: two ranks deadlock if they send to each other and
        # each posts its receive after its send. With overlap a valid plan runs with any a. A smallest a exists, because
        # no send blocks if all receives are posted at the beginning. GPipe needs 0, 1F1B and ZB-H1 at most 1,
        # interleaved, ZB-H2 and DualPipeV 2, ZB-V 3.
        return next(lookahead for lookahead in count() if _runs_with_blocking_sends(self, lookahead))

    @cached_property
    def steps(self) -> tuple[tuple[int, tuple[Action, ...], tuple[tuple[Action, bool], ...]], ...]:
        """The turns in the order of ``walk``, and for each its dependencies with a flag: whether it is on that rank."""
        # Cached, because a planner simulates one plan with many costs.
        where = self.stage_to_rank
        return tuple(
            (rank, turn, tuple((need, where[need.stage] == rank) for need in self._needs_of(turn)))
            for rank, turn in self.walk()
        )

    def missing(self, turn: Iterable[Action], done: Collection[Action]) -> Action | None:
        """The first dependency of ``turn`` that is not in ``done``; None if the turn can run."""
        return next((need for need in self._needs_of(turn) if need not in done), None)

    def _needs_of(self, turn: Iterable[Action]) -> tuple[Action, ...]:
        return tuple(need for action in turn for need in self.needs(action))

    def walk(self) -> Iterator[tuple[int, tuple[Action, ...]]]:
        """Yield (rank, turn) in an order that respects every list and dependency; it ends early in a deadlock."""
        done: set[Action] = set()
        waiting: dict[Action, list[int]] = {}
        position = [0] * len(self.ranks)
        ready = deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            turns = self.turns[rank]
            while position[rank] < len(turns):
                turn = turns[position[rank]]
                missing = self.missing(turn, done)
                # The rank is woken by the action that it misses, so that the walk visits each action once.
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                done.update(turn)
                position[rank] += 1
                for action in turn:
                    ready.extend(waiting.pop(action, ()))
                yield rank, turn


def _turns(actions: tuple[Action, ...], paired: frozenset[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield the turns of one rank; a forward that is the last action of its rank has no partner."""
    position = 0
    while position < len(actions):
        length = 2 if actions[position] in paired else 1
        yield actions[position : position + length]
        position += length


def _runs_with_blocking_sends(plan: Plan, lookahead: int) -> bool:
    """Whether every rank reaches the end of its list: see ``Plan.receive_lookahead``."""
    ranks = range(len(plan.ranks))
    links = (plan.messages(sender, receiver) for sender in ranks for receiver in ranks)
    # Receives of a link are posted in the order of sending, so a number says how many have been.
    number = {message: index for messages in links for index, message in enumerate(messages)}
    posted: defaultdict[tuple[int, int], int] = defaultdict(int)  # receives by sender and receiver
    done: set[Action] = set()
    position = [0] * len(plan.ranks)
    progress = True
    while progress:
        progress = False
        for rank, turns in enumerate(plan.turns):
            while position[rank] < len(turns):
                index = position[rank]
                turn = turns[position[rank]]
                for early in (action for coming in turns[index : index + 1 + lookahead] for action in coming):
                    source = plan.source(early)
                    sender = plan.sender(early)
                    if source is not None and sender is not None:
                        posted[sender, rank] = max(posted[sender, rank], number[source] + 1)
                # A turn that has run may still wait for its send.
                if turn[0] not in done:
                    if plan.missing(turn, done) is not None:
                        break
                    done.update(turn)
                    progress = True
                receivers = ((action, plan.receiver(action)) for action in turn)
                if any(to is not None and posted[rank, to] <= number[action] for action, to in receivers):
                    break
                position[rank] += 1
                progress = True
    return all(index == len(turns) for index, turns in zip(position, plan.turns, strict=True))


def round_robin_stages(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Put stage s on rank s mod p: rank r's chunk c is stage c p + r (Narayanan et al. 2021, section 2.2)."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def v_shaped_stages(num_ranks: int) -> tuple[int, ...]:
    """Put stages r and 2p - 1 - r on rank r, so that the two middle stages p - 1 and p are on the same rank.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362).
    """
    return (*range(num_ranks), *range(num_ranks - 1, -1, -1))


def plan_of_turns(
    ranks: Iterable[Iterable[tuple[Action, ...]]],
    stage_to_rank: tuple[int, ...],
    num_microbatches: int | None = None,
) -> Plan:
    """Make a plan of each rank's turns, without the actions of surplus micro-batches if their number is given."""
    turns = [list(turns_of_rank) for turns_of_rank in ranks]
    if num_microbatches is not None:
        # The other action of a pair remains.
        left = ([tuple(a for a in turn if a.micro < num_microbatches) for turn in rank] for rank in turns)
        turns = [list(filter(None, turns_of_rank)) for turns_of_rank in left]
    # The first action of a pair identifies it, as the second follows it.
    paired = frozenset(turn[0] for turns_of_rank in turns for turn in turns_of_rank if len(turn) > 1)
    return Plan(
        tuple(tuple(action for turn in turns_of_rank for action in turn) for turns_of_rank in turns),
        stage_to_rank,
        paired,
    )


def format_turn(turn: tuple[Action, ...]) -> str:
    """The text of a turn, as in the file of a plan: ``0F3&0B1``."""
    return "&".join(map(str, turn))
