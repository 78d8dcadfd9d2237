"""Messages of a plan when a send blocks until its receive is posted.

The model. For each ordered pair of ranks there is one link, whose messages arrive in the order in which they were
sent. A rank runs its list in order. Before it runs action i it has posted the receives of all messages that actions
i to i + a need, and of those that their senders send before them: a link's receives are posted in its sender's
order, ``Plan.messages``. An action runs when its messages are there; then its output is sent.

- With overlap, a send is begun and waited for at the end. No send holds a rank up, so a plan whose dependencies can
  all be met (``Plan.walk`` comes to its end) runs with any a.
- Without overlap, a rank goes on when the receive of what it sends has been posted. Two ranks that send to each
  other, and would each post the other's receive afterwards, wait forever; whether that happens depends on a.
  ``receives_ahead`` is the smallest a with which the plan runs. There always is one: if all receives are posted at
  the beginning, no send blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

from megatron_core.pipeline_parallel.actions import Action, Plan


def order_problems(plan: Plan) -> Iterator[str]:
    """Where a rank takes messages from one stage to another in an order other than the one they are sent in.

    Between two stages, not between two ranks: on a V, neighbours exchange activations of one chunk and gradients of
    the other over the same link, and a rank may take one before the other. Each is received in the order of sending.
    """
    position = {action: at for actions in plan.ranks for at, action in enumerate(actions)}
    for receiver, actions in enumerate(plan.ranks):
        latest: dict[tuple[int, bool], Action] = {}
        for action in actions:
            source = plan.source(action)
            if source is None or plan.place[source.stage] == receiver:
                continue
            sender, stream = plan.place[source.stage], (source.stage, source.kind == "F")
            before = latest.get(stream)
            if before is not None and position[before] > position[source]:
                yield f"rank {receiver} takes {before} before {source}, but rank {sender} sends {source} first"
            else:
                latest[stream] = source


def receives_ahead(plan: Plan) -> int:
    """How many actions ahead receives must be posted so that sends that block cannot lock the ranks.

    The plan must be sound (``checks.check``). 1F1B and ZB-H1 need at most 1,
    interleaved, ZB-H2 and DualPipeV 2, ZB-V 3.
    """
    return next(ahead for ahead in count() if _Blocking(plan, ahead).finishes())


class _Blocking:
    """A run of a plan whose sends block, with receives posted ``ahead`` actions early."""

    def __init__(self, plan: Plan, ahead: int) -> None:
        self.plan, self.ahead = plan, ahead
        self.number: dict[Action, int] = {}  # a message's place on its link
        sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        for sender, actions in enumerate(plan.ranks):
            for action in actions:
                receiver = plan.receiver(action)
                if receiver is not None:
                    self.number[action] = sent[sender, receiver]
                    sent[sender, receiver] += 1
        self.posted: defaultdict[tuple[int, int], int] = defaultdict(int)  # receives posted on each link
        self.run: set[Action] = set()
        self.position = [0] * len(plan.ranks)

    def finishes(self) -> bool:
        """Whether every rank comes to the end of its list."""
        while any([self._goes_on(rank) for rank in range(len(self.plan.ranks))]):
            pass
        return all(at == len(actions) for at, actions in zip(self.position, self.plan.ranks, strict=True))

    def _goes_on(self, rank: int) -> bool:
        """Run a rank as far as it gets; whether it got anywhere."""
        actions, start, ran = self.plan.ranks[rank], self.position[rank], len(self.run)
        while self.position[rank] < len(actions):
            at = self.position[rank]
            self._post(rank, actions[at : at + 1 + self.ahead])
            if actions[at] not in self.run:
                if any(need not in self.run for need in self.plan.needs(actions[at])):
                    break
                self.run.add(actions[at])
            receiver = self.plan.receiver(actions[at])
            if receiver is not None and self.posted[rank, receiver] <= self.number[actions[at]]:
                break
            self.position[rank] += 1
        return (start, ran) != (self.position[rank], len(self.run))

    def _post(self, rank: int, actions: tuple[Action, ...]) -> None:
        for action in actions:
            source = self.plan.source(action)
            if source in self.number:
                link = self.plan.place[source.stage], rank
                self.posted[link] = max(self.posted[link], self.number[source] + 1)
