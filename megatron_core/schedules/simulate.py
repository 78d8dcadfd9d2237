"""When each action of a plan runs, for given costs: makespan, bubble, and the activations that are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_core.errors import ConfigError
from megatron_core.schedules.actions import Action, Plan


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch in one rank's share of the model, which is 1/p of the layers, in any one unit.

    A chunk takes 1/v of them, so that schedules with different numbers of chunks compare. B = I + W.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    comm: float = 0.0
    """From the end of an action until its output is on another rank; the sender does not wait meanwhile."""

    def __post_init__(self) -> None:
        """``ConfigError`` for a time below 0, or none above it."""
        times = (self.forward, self.input_grad, self.weight_grad)
        if not all(0 <= time < float("inf") for time in (*times, self.comm)) or not any(times):
            raise ConfigError(f"costs={self.text} must be finite, 0 or more, with F, I or W above 0")

    @classmethod
    def parse(cls, text: str) -> Costs:
        """Costs from ``F,I,W,COMM``; COMM may be left out."""
        try:
            numbers = [float(word) for word in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4):
            raise ConfigError(f"costs={text!r} must be F,I,W,COMM: three or four numbers, such as 1,1,1,0")
        return cls(*numbers)

    @property
    def text(self) -> str:
        """As ``parse`` reads it."""
        return ",".join(f"{time:g}" for time in (self.forward, self.input_grad, self.weight_grad, self.comm))

    def time(self, plan: Plan, action: Action) -> float:
        """Time of an action: 1/v of its kind's."""
        whole = self.input_grad + self.weight_grad
        kinds = {"F": self.forward, "I": self.input_grad, "W": self.weight_grad, "B": whole}
        return kinds[action.kind] / plan.num_chunks


@dataclass(frozen=True)
class StageCosts:
    """Times of one micro-batch in each stage, which need not be equal: the last one has the loss, too."""

    times: Mapping[tuple[int, str], float]
    """By stage and kind of action. Of the stage as it is: nothing is divided by the number of chunks."""
    comm: float = 0.0
    """As in ``Costs``."""

    @property
    def text(self) -> str:
        """A word for each: ``0F 12.3``, ``1W 4.5``, and ``COMM 0.2``."""
        words = [f"{stage}{kind} {time:.4g}" for (stage, kind), time in sorted(self.times.items())]
        return ", ".join([*words, f"COMM {self.comm:.4g}"])

    def time(self, plan: Plan, action: Action) -> float:
        """Time of an action."""
        return self.times[action.stage, action.kind]


@dataclass(frozen=True)
class Timeline:
    """When each action of a plan ran, simulated or measured."""

    plan: Plan
    start: dict[Action, float]
    end: dict[Action, float]

    @property
    def makespan(self) -> float:
        """From the first action's start to the last one's end, over all ranks."""
        return max(self.end.values(), default=0.0) - min(self.start.values(), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Each rank's time in actions."""
        return tuple(sum(self.end[a] - self.start[a] for a in actions) for actions in self.plan.ranks)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Each rank's time from its own first action to its own last one."""
        return tuple(
            max(self.end[a] for a in actions) - min(self.start[a] for a in actions) if actions else 0.0
            for actions in self.plan.ranks
        )

    @property
    def bubble(self) -> float:
        """The bubble rate of the papers: (cost - work) / cost, cost = the longest span, work = the mean busy time.

        With equal stages work = m (F + I + W). Ranks may begin and end at different times, as in ZB-H2: what lies
        before a rank's first action and behind its last one belongs to the step before and the one behind it. Source:
        Qi et al. 2023, tables 5 and 6.
        """
        if max(self.spans) == 0:
            return 0.0
        return 1 - sum(self.busy) / len(self.busy) / max(self.spans)

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which nothing runs, if all wait for the last: 1 - busy / (p makespan)."""
        return 1 - sum(self.busy) / len(self.busy) / self.makespan if self.makespan else 0.0


def simulate(plan: Plan, costs: Costs | StageCosts) -> Timeline:
    """Run a sound plan: an action starts once its rank is free and what it needs is there.

    start(a) = max(end of the rank's action before, end(n) + COMM [n is on another rank] for n in needs(a)),
    end(a) = start(a) + time(a).

    A message takes COMM on every edge between stages on different ranks, and neither rank is busy meanwhile: with
    overlap, and links that do not queue. This convention gives the published rates of 1F1B, ZB-H1 and ZB-H2 in Qi et
    al. 2023, tables 5 and 6.
    """
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    free = [0.0] * len(plan.ranks)
    times: dict[tuple[int, str], float] = {}
    for rank, action, needs in plan.steps:
        begin = free[rank]
        for need, is_here in needs:
            there = end[need] if is_here else end[need] + costs.comm
            if there > begin:
                begin = there
        kind = action.stage, action.kind
        if kind not in times:
            times[kind] = costs.time(plan, action)
        start[action] = begin
        end[action] = free[rank] = begin + times[kind]
    return Timeline(plan, start, end)


def peak_activations(
    plan: Plan, kept_for_weights: float = 1.0, stage_sizes: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Each rank's peak of held activations, in micro-batches through all of a rank's layers (1/v for one chunk).

    ``stage_sizes`` gives what one micro-batch holds in each stage, in any other unit, such as bytes.
    A micro-batch's activations in a stage are held from its F to its B; if the backward is split, to its W, except
    for the share ``1 - kept_for_weights``, which the I gives back. Forwards without a backward hold nothing. The
    default, where I gives nothing back, is the upper bound that ZB-H1 keeps to p. Source: Qi et al. 2023, section 2
    (M_B until the I, M_W until the W).
    """
    given_back = {"F": -1.0, "B": 1.0, "I": 1.0 - kept_for_weights, "W": kept_for_weights}
    kept = {(action.stage, action.micro) for actions in plan.ranks for action in actions if action.kind != "F"}
    sizes, unit = (stage_sizes, 1) if stage_sizes else ([1.0] * plan.num_stages, plan.num_chunks)
    peaks = []
    for actions in plan.ranks:
        held = peak = 0.0
        for action in actions:
            if (action.stage, action.micro) not in kept:
                continue
            held -= given_back[action.kind] * sizes[action.stage]
            peak = max(peak, held)
        peaks.append(peak / unit)
    return tuple(peaks)
