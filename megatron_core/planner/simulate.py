"""Simulate a plan with given costs: start and end of each action, makespan, bubble and peak activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_core.errors import ConfigError
from megatron_core.schedules.actions import Action, Plan


@dataclass(frozen=True)
# Ratios matter and not units, so that published tables can be compared.
class Costs:
    """Times of one micro-batch in one rank's share of the model (1/p of the layers), in any common unit.

    A chunk takes 1/v of these times, so that schedules with different numbers of chunks are comparable. B = I + W.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    comm: float = 0.0
    """Time from the end of an action until its output has arrived on another rank; the sender does not wait."""
    exchange: float = 0.0
    """Share of ``forward``, and of ``input_grad``, in which the rank only waits for messages between experts. A pair of
    a forward and a backward hides them behind the computation of both."""

    def __post_init__(self) -> None:
        """``ConfigError`` if a time is negative or not finite, or if F, I and W are all 0."""
        times = (self.forward, self.input_grad, self.weight_grad)
        if not all(0 <= time < float("inf") for time in (*times, self.comm)) or not any(times):
            raise ConfigError(f"costs={self.text} must be finite and >= 0, with F, I or W > 0")
        if not 0 <= self.exchange <= min(self.forward, self.input_grad):
            raise ConfigError(f"costs={self.text}: the exchange between experts is part of F and of I: 0 to min(F, I)")

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """Parse costs from ``F,I,W,COMM,EXCHANGE``; the last two are optional."""
        try:
            numbers = [float(word) for word in text.split(",")]
        except ValueError:
            numbers = []
        if not 3 <= len(numbers) <= 5:
            raise ConfigError(f"costs={text!r} must be F,I,W,COMM,EXCHANGE: three to five numbers, such as 1,1,1,0")
        return cls(*numbers)

    @property
    def text(self) -> str:
        """The costs in the format of ``parse``."""
        times = [self.forward, self.input_grad, self.weight_grad, self.comm, *[self.exchange] * (self.exchange > 0)]
        return ",".join(f"{time:g}" for time in times)

    def time(self, plan: Plan, action: Action) -> float:
        """Time of an action: 1/v of the time of its kind."""
        # A whole backward computes both gradients.
        backward = self.input_grad + self.weight_grad
        kinds = {"F": self.forward, "I": self.input_grad, "W": self.weight_grad, "B": backward}
        return kinds[action.kind] / plan.num_chunks

    def pair_time(self, plan: Plan, forward: Action, backward: Action) -> float:
        """Time of a pair: max(F + B - 2 EXCHANGE, 2 EXCHANGE, F, B), as computations and messages each run in turn."""
        full_backward = self.input_grad + self.weight_grad
        # Each of both actions has one exchange, during which the other computes.
        hidden = 2 * self.exchange
        return max(self.forward + full_backward - hidden, hidden, self.forward, full_backward) / plan.num_chunks


@dataclass(frozen=True)
class StageCosts:
    """Times of one micro-batch in each stage; stages may differ, as the last one also computes the loss."""

    times: Mapping[tuple[int, str], float]
    """Times by stage and kind of action, not divided by the number of chunks."""
    comm: float = 0.0
    """Time of a message between ranks, as in ``Costs``."""
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Times of pairs by the stages of forward and backward; of the others, the sum of the times of both."""

    @property
    def text(self) -> str:
        """A list of all times: ``0F 12.3, 1W 4.5, 0F&1B 20, COMM 0.2``."""
        words = [f"{stage}{action_kind} {time:.4g}" for (stage, action_kind), time in sorted(self.times.items())]
        words += [f"{first}F&{second}B {time:.4g}" for (first, second), time in sorted(self.pairs.items())]
        return ", ".join([*words, f"COMM {self.comm:.4g}"])

    def time(self, plan: Plan, action: Action) -> float:
        """Time of an action."""
        return self.times[action.stage, action.kind]

    def pair_time(self, plan: Plan, forward: Action, backward: Action) -> float:
        """Time of a pair."""
        measured = self.pairs.get((forward.stage, backward.stage))
        return self.time(plan, forward) + self.time(plan, backward) if measured is None else measured


@dataclass(frozen=True)
class TransferSpan:
    """A collective or a copy in flight, from its call to the end of its wait."""

    name: str
    start: float
    end: float
    waited: float
    """Part of this time in which the rank only waited."""


@dataclass(frozen=True)
class Timeline:
    """Start and end of each action of a plan, simulated or measured; those of the actions of a pair are equal."""

    plan: Plan
    start: dict[Action, float]
    end: dict[Action, float]
    waited: dict[Action, float] = field(default_factory=dict)
    """Time of each turn, by its first action, in which the rank only waited for collectives; only if measured."""
    transfers: tuple[tuple[TransferSpan, ...], ...] = ()
    """The transfers of each rank, in the order of their starts; only if measured."""

    @property
    def makespan(self) -> float:
        """Time from the first action's start to the last action's end, over all ranks."""
        return max(self.end.values(), default=0.0) - min(self.start.values(), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Each rank's total time in actions; a pair counts once."""
        return tuple(sum(self.end[turn[0]] - self.start[turn[0]] for turn in turns) for turns in self.plan.turns)

    @cached_property
    def boxes(self) -> dict[Action, tuple[float, float]]:
        """Start and end of each action in a drawing: the time of a pair is divided equally between its actions."""
        drawn = {}
        for turns in self.plan.turns:
            for turn in turns:
                for index, action in enumerate(turn):
                    length = (self.end[action] - self.start[action]) / len(turn)
                    drawn[action] = self.start[action] + index * length, self.start[action] + (index + 1) * length
        return drawn

    @cached_property
    def shares(self) -> tuple[dict[str, float], ...]:
        """Each rank's shares of the makespan: computation, waiting for collectives, idle; () if not measured."""
        if not self.waited or not self.makespan:
            return ()
        waits = [sum(self.waited[turn[0]] for turn in turns) for turns in self.plan.turns]
        return tuple(
            {
                "computation": (busy - wait) / self.makespan,
                "collectives": wait / self.makespan,
                "idle": 1 - busy / self.makespan,
            }
            for busy, wait in zip(self.busy, waits, strict=True)
        )

    @cached_property
    def traffic(self) -> tuple[dict[str, dict[str, float]], ...]:
        """Totals of each rank's transfers by name: number, time in flight, time in which the rank only waited."""
        totals: list[dict[str, dict[str, float]]] = []
        for transfers in self.transfers:
            totals.append({})
            for transfer in transfers:
                total = totals[-1].setdefault(transfer.name, {"number": 0, "in_flight": 0.0, "waited": 0.0})
                total["number"] += 1
                total["in_flight"] += transfer.end - transfer.start
                total["waited"] += transfer.waited
        return tuple(totals)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Each rank's time from the start of its own first action to the end of its own last action."""
        return tuple(
            max(self.end[a] for a in actions) - min(self.start[a] for a in actions) if actions else 0.0
            for actions in self.plan.ranks
        )

    @property
    def bubble(self) -> float:
        """The bubble rate of the papers: (cost - work) / cost, cost = the longest span, work = the mean busy time.

        With equal stages work = m (F + I + W). Ranks may begin and end at different times, as in ZB-H2: the time before
        a rank's first action belongs to the previous step, the time after its last action to the next step. Source:
        Qi et al. 2023, tables 5 and 6.
        """
        if max(self.spans) == 0:
            return 0.0
        return 1 - sum(self.busy) / len(self.busy) / max(self.spans)

    @property
    def idle(self) -> float:
        """Idle share of all ranks' time if each step ends with a barrier: 1 - (sum of busy) / (p makespan)."""
        return 1 - sum(self.busy) / len(self.busy) / self.makespan if self.makespan else 0.0


def simulate(plan: Plan, costs: Costs | StageCosts) -> Timeline:
    """Simulate a valid plan: a turn starts when its rank is free and its dependencies have arrived.

    For an action a that is a turn, and for both actions of a pair:
    start(a) = max(end of the rank's previous action, end(n) + COMM [n is on another rank] for n in needs(a)),
    end(a) = start(a) + time(a).

    """
    # A message takes COMM on every edge between stages on different ranks and occupies neither rank: communication
    # overlaps with computation, and messages do not queue on a link. This convention gives the published rates of 1F1B,
    # ZB-H1 and ZB-H2 in Qi et al. 2023, tables 5 and 6.
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    # In the order of ``steps``, so that one pass suffices: all dependencies of a turn have ended.
    free = [0.0] * len(plan.ranks)
    times: dict[tuple[tuple[int, str], ...], float] = {}
    for rank, turn, needs in plan.steps:
        begin = free[rank]
        for need, is_here in needs:
            arrival = end[need] if is_here else end[need] + costs.comm
            if arrival > begin:
                begin = arrival
        # Looked up by stage and kind: a plan has thousands of actions and few different times.
        key = tuple((action.stage, action.kind) for action in turn)
        if key not in times:
            times[key] = costs.time(plan, *turn) if len(turn) == 1 else costs.pair_time(plan, *turn)
        free[rank] = begin + times[key]
        for action in turn:
            start[action] = begin
            end[action] = free[rank]
    return Timeline(plan, start, end)


def peak_activations(
    plan: Plan, kept_for_weights: float = 1.0, stage_sizes: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return each rank's peak of stored activations, in micro-batches of all of a rank's layers (1/v for one chunk).

    ``stage_sizes`` is the size of one micro-batch's activations in each stage, in any other unit, such as bytes.
    A micro-batch's activations in a stage are stored from its F to its B. If the backward is split, the I frees the
    share ``1 - kept_for_weights`` and the W the rest. Forwards without a backward store nothing.
    Source: Qi et al. 2023, section 2 (M_B until the I, M_W until the W).
    """
    # The default, in which I frees nothing, is an upper bound; for ZB-H1 it is p.
    freed = {"F": -1.0, "B": 1.0, "I": 1.0 - kept_for_weights, "W": kept_for_weights}
    with_backward = {(action.stage, action.micro) for actions in plan.ranks for action in actions if action.kind != "F"}
    sizes, unit = (stage_sizes, 1) if stage_sizes else ([1.0] * plan.num_stages, plan.num_chunks)
    peaks = []
    for actions in plan.ranks:
        stored = peak = 0.0
        for action in actions:
            if (action.stage, action.micro) not in with_backward:
                continue
            stored -= freed[action.kind] * sizes[action.stage]
            peak = max(peak, stored)
        peaks.append(peak / unit)
    return tuple(peaks)
