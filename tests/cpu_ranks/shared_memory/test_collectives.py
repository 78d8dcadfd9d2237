"""Every collective over shared memory, compared bitwise with plain arithmetic, in any order of calls."""

from __future__ import annotations

import time
from itertools import product
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_core.cpu_ranks.shared_memory.backend import unavailable_reason
from megatron_core.cpu_ranks.shared_memory.group import SharedMemoryGroup
from megatron_core.cpu_ranks.shared_memory.work import SLICE
from megatron_core.verify.ranks import run_ranks
from tests.cpu_ranks.shared_memory.reference import DTYPES, KINDS, same, start, values
from tests.sample import WHOLE_MATRIX

RANKS = 4
COUNTS = (1, 7, 1000, 16_385, *([(1 << 17) + 1] if WHOLE_MATRIX else []))
LARGE = (700_001, *([(64 << 20) // 4] if WHOLE_MATRIX else []))
"""All-reduces of more than one piece."""


def groups() -> list[dist.ProcessGroup]:
    """This rank's groups: all ranks, neighbours or not, a different order of ranks, a single rank."""
    assert unavailable_reason() is None
    found = [dist.group.WORLD]
    for ranks in ([0, 2], [1, 3], [0, 1, 3], [3, 2], *([rank] for rank in range(RANKS))):
        group = dist.new_group(ranks)
        found += [group] if dist.get_rank() in ranks else []
    assert all(isinstance(group, SharedMemoryGroup) for group in found)
    return found


def check_all(counts: tuple[int, ...]) -> int:
    cases = list(product(KINDS, DTYPES, counts, (True, False)))
    mine = groups()
    for group in mine:
        for seed, (kind, dtype, count, wait) in enumerate(cases):
            found, expected, finish = start(kind, seed, count, dtype, group, wait=wait)
            finish()
            where = (kind, dtype, count, dist.get_process_group_ranks(group), wait)
            assert found.dtype == expected.dtype and same(found, expected), where
    return len(cases) * len(mine)


def test_every_collective_dtype_size_and_group() -> None:
    assert min(run_ranks(RANKS, check_all, COUNTS, timeout=900.0)) >= 1000


def check_kinds(mebibytes: int) -> None:
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            count = (mebibytes << 20) // dtype.itemsize // (1 if kind in ("all_reduce", "broadcast") else 2)
            found, expected, finish = start(kind, 3, count, dtype, dist.group.WORLD, wait=False)
            finish()
            assert same(found, expected), (kind, dtype)


def test_large_tensors() -> None:
    run_ranks(2, check_kinds, 64 if WHOLE_MATRIX else 3, timeout=300.0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_worlds_of_other_sizes(ranks: int) -> None:
    assert run_ranks(ranks, check_large, (5, 40_001), ranks) == [4] * ranks


def check_large(counts: tuple[int, ...], ranks: int) -> int:
    """All-reduces, synchronous and not; more than two ranks divide the work."""
    done = 0
    for count in counts:
        for wait in (True, False):
            found, expected, finish = start("all_reduce", 3 * done, count, torch.float32, dist.group.WORLD, wait=wait)
            finish()
            assert same(found, expected), (count, ranks, wait)
            done += 1
    return done


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_all_reduce(ranks: int) -> None:
    assert run_ranks(ranks, check_large, LARGE, ranks) == [2 * len(LARGE)] * ranks


def not_a_number() -> list[list[float]]:
    """A maximum or minimum with NaN on any one rank."""
    rows = []
    for bad in range(dist.get_world_size()):
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.SUM):
            x = torch.full((9,), float("nan") if dist.get_rank() == bad else 1.0)
            dist.all_reduce(x, op=op)
            rows.append(x.tolist())
    return rows


def test_nan_is_seen_on_every_rank() -> None:  # C47
    for rows in run_ranks(2, not_a_number):
        assert all(value != value for row in rows for value in row)


# Orders of calls. A program is a list of operations that all members of a group call in this order; each rank waits for
# asynchronous ones at any time.


def draw_program(seed: int) -> list[tuple]:
    """Kind, group, ends of a message, seed, count, dtype and whether to wait, of each operation."""
    draw = Random(seed)
    return [
        (
            draw.choice([*KINDS, "barrier", "message", "message"]),
            draw.randrange(len(MEMBERS)),
            draw.sample(range(RANKS), 2),
            draw.randrange(1 << 20),
            draw.choice([1, 3, 100, 5000, 20_000]),
            draw.choice(DTYPES),
            draw.random() < 0.3,
        )
        for _ in range(draw.randint(1, 12))
    ]


MEMBERS = (range(RANKS), (0, 2), (1, 3), (0, 1, 3), (3, 2))


def run_program(program: list[tuple], mine: Random, groups: list[dist.ProcessGroup | None]) -> None:
    """Run it on this rank; ``mine`` determines when this rank waits for each operation."""
    under_way: list[tuple] = []
    for number, (kind, index, ends, seed, count, dtype, wait) in enumerate(program):
        if kind == "message":
            under_way += message(ends, seed, count, dtype)
        elif groups[index] is not None:
            if kind == "barrier":
                dist.barrier(groups[index])
            else:
                under_way.append((*start(kind, seed, count, dtype, groups[index], wait=wait), kind))
        while under_way and mine.random() < (0.4 if number + 1 < len(program) else 1):
            found, expected, finish, kind = under_way.pop(mine.randrange(len(under_way)))
            finish()
            assert same(found, expected), (kind, number, program)


def message(ends: list[int], seed: int, count: int, dtype: torch.dtype) -> list[tuple]:
    """One message from ``ends[0]`` to ``ends[1]``, with one of two tags."""
    sent = values(seed, count, dtype)
    if dist.get_rank() == ends[0]:
        x = sent.clone()
        handle = dist.isend(x, ends[1], tag=seed % 2)
        x.zero_()  # its data was copied in the call
        return [(sent, sent, handle.wait, "send")]
    if dist.get_rank() == ends[1]:
        out = torch.empty_like(sent)
        return [(out, sent, dist.irecv(out, ends[0], tag=seed % 2).wait, "receive")]
    return []


def run_programs(count: int) -> int:
    groups = [dist.group.WORLD, *([dist.new_group(list(ranks)) for ranks in MEMBERS[1:]])]
    groups = [group if dist.get_rank() in ranks else None for group, ranks in zip(groups, MEMBERS, strict=True)]
    for seed in range(count):
        run_program(draw_program(seed), Random(f"{seed} {dist.get_rank()}"), groups)
    return count


def test_random_sequences() -> None:
    count = 1000 if WHOLE_MATRIX else 150
    assert run_ranks(RANKS, run_programs, count, timeout=600.0) == [count] * RANKS


def exchange_messages() -> int:
    """Numbered messages of equal size: those of a tag arrive in order for any order of receives and waits."""
    mine, count = Random(7), 24
    sequences = {tag: [n for n in range(count) if n % 3 == tag] for tag in range(3)}
    if dist.get_rank() == 0:
        for number in range(count):
            dist.send(torch.tensor([number]), 1, tag=number % 3)
        return 0
    order = [tag for tag, numbers in sequences.items() for _ in numbers]
    mine.shuffle(order)
    started = []
    for tag in order:
        started.append((tag, sequences[tag].pop(0), out := torch.tensor([-1]), dist.irecv(out, 0, tag=tag)))
        if mine.random() < 0.3:
            started[mine.randrange(len(started))][3].wait()
    mine.shuffle(started)
    for tag, number, out, handle in started:
        handle.wait()
        assert out == number, (tag, number)
    return len(started)


def test_messages_of_a_tag_come_in_their_order() -> None:  # C65
    assert run_ranks(2, exchange_messages) == [0, 24]


def meet_late() -> None:
    """One rank arrives later than the interval of checks in a wait."""
    if dist.get_rank() == 1:
        time.sleep(2.5 * SLICE / 1e6)
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 3


def test_a_rank_that_is_late() -> None:
    run_ranks(2, meet_late)


def run_orders(examples: int) -> int:
    """Every rank draws the same examples: hypothesis is deterministic here with a common seed."""
    ran = 0

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(
        st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 999), st.sampled_from((1, 9, 4000))), max_size=8),
        st.lists(st.permutations(range(8)), min_size=3, max_size=3),
    )
    def check(operations: list[tuple], orders: list[list[int]]) -> None:
        nonlocal ran
        ran += 1
        started = [
            start(kind, seed, count, torch.float64, dist.group.WORLD, wait=False) for kind, seed, count in operations
        ]
        for at in orders[dist.get_rank()]:
            if at < len(started):
                found, expected, finish = started[at]
                finish()
                assert same(found, expected), (operations, orders)

    check()
    return ran


def test_any_order_of_waits() -> None:
    ran = run_ranks(3, run_orders, 300 if WHOLE_MATRIX else 50)
    assert ran[0] >= 20 and ran == ran[:1] * 3
