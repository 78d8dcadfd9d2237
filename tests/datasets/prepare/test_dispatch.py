"""Workers that come and go in any order make every part once, and joining finds them in order."""

import random

import pytest

from megatron_core.datasets.prepare.dispatch import Dispatcher
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.parts import Group, make_groups


def play(groups: list[Group], true_parts: list[int], workers: int, ahead: int, seed: int, crash: int) -> list:
    """The parts joined when workers finish in random order; after `crash` joins it starts anew with what was made."""
    chance = random.Random(seed)
    dispatcher, joined, on_disk = Dispatcher(groups, (0, 0), ahead), [], {}
    busy: dict[int, tuple[int, int]] = {}
    while not dispatcher.finished:
        for worker in set(range(workers)) - set(busy):
            if (part := dispatcher.take(worker)) is not None:
                assert part not in busy.values() and part not in on_disk and part >= dispatcher.position
                busy[worker] = part
        assert busy and len(busy) <= workers
        worker = chance.choice(list(busy))
        group, index = busy.pop(worker)
        dispatcher.returned()
        last = index + 1 >= true_parts[group]
        on_disk[group, index] = last
        dispatcher.found(group, index, last)
        while dispatcher.ready():
            joined.append(dispatcher.pop())
        if len(joined) >= crash:
            crash, busy = 10**9, {}
            position = dispatcher.position
            dispatcher = Dispatcher(groups, position, ahead)
            for (group, index), last in on_disk.items():
                dispatcher.found(group, index, last)
            while dispatcher.ready():
                joined.append(dispatcher.pop())
    return [part[:2] for part in joined]


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("ahead", [1, 3, 100])
def test_every_part_is_made_once_and_joined_in_order(workers: int, ahead: int) -> None:
    for seed in range(60):
        chance = random.Random(seed)
        true_parts = [chance.randint(1, 6) for _ in range(chance.randint(1, 6))]
        groups = [Group(n, n + 1, parts if chance.random() < 0.5 else None, 10) for n, parts in enumerate(true_parts)]
        expected = [(group, index) for group, parts in enumerate(true_parts) for index in range(parts)]
        for crash in (10**9, chance.randint(1, len(expected))):
            assert play(groups, true_parts, workers, ahead, seed, crash) == expected


def test_workers_take_streams_of_their_own_and_then_share() -> None:
    dispatcher = Dispatcher([Group(n, n + 1, None, 10) for n in range(2)], (0, 0), 100)
    assert [dispatcher.take(0), dispatcher.take(1)] == [(0, 0), (1, 0)]
    dispatcher.found(1, 0, True)
    assert [dispatcher.take(1), dispatcher.take(0)] == [(0, 1), (0, 2)]


def test_groups_are_made_of_sizes() -> None:
    def source(kind: str, size: int, compression: str | None = None) -> Source:
        return Source("x", kind, compression, size, 0)

    sources = [
        source("jsonl", 4),
        source("text", 4),
        source("jsonl", 4),
        source("jsonl", 25),
        source("jsonl", 3, "gzip"),
    ]
    sources += [source("parquet", 5), source("text", 500), source("text", 1)]
    assert make_groups(sources, None, 10) == [
        Group(0, 2, 1, None), Group(2, 3, 1, None), Group(3, 4, 3, 10), Group(4, 5, None, 10), Group(5, 6, None, 1),
        Group(6, 7, 1, None), Group(7, 8, 1, None),
    ]  # fmt: skip
    assert make_groups(sources[6:], "--", 10) == [Group(0, 1, None, 10), Group(1, 2, 1, None)]
    assert [len(group.pieces(0)) for group in make_groups(sources[:2], None, 10)] == [2]
