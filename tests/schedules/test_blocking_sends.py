"""Valid plans run with blocking sends if receives are posted with the computed lookahead."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest

from megatron_core.features.pipeline_schedules.plan_file import parse_action
from megatron_core.features.pipeline_schedules.plans import gpipe, zb_h1, zb_v
from megatron_core.schedules import SCHEDULES, make_plan, one_f_one_b
from megatron_core.schedules.actions import Action, Plan
from megatron_core.schedules.checks import check_plan, order_problems
from tests.schedules.plans import parse_plan


class Ranks:
    """Threads that run a plan over FIFO links with blocking sends."""

    def __init__(self, plan: Plan, lookahead: int, patience: float = 20.0) -> None:
        self.plan, self.lookahead, self.patience = plan, lookahead, patience
        size = len(plan.ranks)
        links = [(a, b) for a in range(size) for b in range(size) if a != b]
        self.posted = {link: threading.Semaphore(0) for link in links}
        self.sent: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
        self.news = threading.Condition()
        self.ended: list[int] = []

    def run(self) -> list[int]:
        """The ranks that reached the end of their lists."""
        threads = [
            threading.Thread(target=self._rank, args=(rank,), daemon=True) for rank in range(len(self.plan.ranks))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * self.patience)
        return sorted(self.ended)

    def _rank(self, rank: int) -> None:
        plan, actions = self.plan, self.plan.ranks[rank]
        unposted = {sender: plan.messages(sender, rank) for sender in range(len(plan.ranks)) if sender != rank}
        number = {m: (sender, at) for sender, messages in unposted.items() for at, m in enumerate(messages)}
        posted = dict.fromkeys(unposted, 0)
        for at, action in enumerate(actions):
            for early in actions[at : at + 1 + self.lookahead]:
                if plan.source(early) in number:
                    sender, last = number[plan.source(early)]
                    while posted[sender] <= last:
                        posted[sender] += 1
                        self.posted[sender, rank].release()
            if plan.source(action) in number:
                sender, place = number[plan.source(action)]
                if not self._arrived((sender, rank), place) or self.sent[sender, rank][place] != plan.source(action):
                    return
            receiver = plan.receiver(action)
            if receiver is not None:
                if not self.posted[rank, receiver].acquire(timeout=self.patience):
                    return
                with self.news:
                    self.sent[rank, receiver].append(action)
                    self.news.notify_all()
        self.ended.append(rank)

    def _arrived(self, link: tuple[int, int], place: int) -> bool:
        with self.news:
            return self.news.wait_for(lambda: len(self.sent[link]) > place, self.patience)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_plans_run_with_blocking_sends(name: str, ranks: int) -> None:  # C32 C65
    for micros in (1, 3, 8):
        plan = make_plan(name, ranks, SCHEDULES[name].chunks or 2, micros)
        assert Ranks(plan, plan.receive_lookahead).run() == list(range(ranks))


def test_how_early_receives_are_posted() -> None:
    assert gpipe(4, 8).receive_lookahead == 0
    assert one_f_one_b(4, 8).receive_lookahead == 1
    assert zb_h1(4, 8).receive_lookahead == 1
    assert make_plan("interleaved", 4, 2, 8).receive_lookahead == 2
    assert zb_v(4, 8).receive_lookahead == 3
    assert one_f_one_b(1, 8).receive_lookahead == 0


def test_two_ranks_that_send_to_each_other() -> None:
    """Rank 0 sends four forwards before it consumes a gradient; rank 1 sends that gradient before it consumes the
    second forward."""
    plan = check_plan(parse_plan(["0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"], (0, 1)), 4)
    assert plan.receive_lookahead == 2
    assert Ranks(plan, 2).run() == [0, 1]
    assert Ranks(plan, 1, patience=0.3).run() == []


def test_swapped_messages_are_found() -> None:
    plan = parse_plan(["0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"], (0, 1))
    assert list(order_problems(plan)) == ["rank 1 consumes 0F1 before 0F0, but rank 0 sends 0F0 first"]


def test_two_streams_over_one_link_may_be_taken_in_any_order() -> None:
    """On a V, rank 0 sends 0F1 before 3I0, and rank 1 consumes the gradient first."""
    lines = ["0F0 3F0 0F1 3I0 3W0 0B0 3F1 3B1 0B1", "1F0 2F0 2I0 2W0 1I0 1W0 1F1 2F1 2B1 1B1"]
    plan = check_plan(parse_plan(lines, (0, 1, 1, 0)), 2)
    assert plan.messages(0, 1) == [parse_action(word) for word in ("0F0", "0F1", "3I0", "3B1")]
    assert plan.messages(1, 0) == [parse_action(word) for word in ("2F0", "1I0", "2F1", "1B1")]
    assert Ranks(plan, plan.receive_lookahead).run() == [0, 1]
