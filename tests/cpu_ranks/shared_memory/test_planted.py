"""Planted defects in the native code and its callers, detected by the comparison with plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.cpu_ranks.shared_memory.compiled import compiled, in_use
from tests.cpu_ranks.shared_memory.test_collectives import (
    check_large,
    exchange_messages,
    meet_late,
    not_a_number,
    run_programs,
)
from tests.defects.plant import planted
from tests.sample import WHOLE_MATRIX

SEEN = ("AssertionError", "did not finish", " sent ", " called ")
"""Symptoms of a defect: a wrong result, or ranks that call different operations."""


@dataclass(frozen=True)
class Planted:
    """A fragment of a file of csrc/cpu/transport, or of a Python function (``module:Qualname``)."""

    where: str
    old: str
    new: str


NATIVE = {
    "sums in another order on each rank": Planted(
        "transport.cpp", "inputs[member] = data_of", "inputs[(member + rank_) % members_] = data_of"
    ),
    "memory reused before all have read it": Planted(
        "transport.cpp", "if (lent.entry->readers.load(std::memory_order_acquire)) {", "if (false) {"
    ),
    "read before it was posted": Planted(
        "transport.cpp",
        "(ring.posted.load(std::memory_order_acquire) - number) > 0",
        "(ring.posted.load() - number) >= 0",
    ),
    "a part copied before it is reduced": Planted(
        "transport.cpp", "entry->reduced.store(0,", "entry->reduced.store(1,"
    ),
    "an input copied instead of its sum": Planted(
        "transport.cpp", "data_of(member, number) + behind", "data_of(member, number) + first"
    ),
    "every rank the first part": Planted("transport.cpp", "rank_ * bytes, out, bytes", "0 * bytes, out, bytes"),
    "the part of another rank": Planted(
        "transport.cpp", "data_of(member, number) + begins[rank_]", "data_of(member, number) + begins[0]"
    ),
    "NaN is passed over": Planted("reduce.h", " | (b != b) ? b : a", " ? b : a"),
}
"""Compiling takes a second each, so ``make test`` runs every fourth."""
GROUP, WORK, MESSAGES = (f"cpu_ranks.shared_memory.{name}" for name in ("group", "work", "messages"))
IN_PYTHON = {
    "no rank waits": Planted(f"{WORK}:GroupProcesses.wait_for", "while missing:", "while False:"),
    "every piece from the first": Planted(
        f"{GROUP}:SharedMemoryGroup.allreduce",
        "address + start, length, address + start",
        "address, length, address + start",
    ),
    "messages in the wrong order": Planted(
        f"{MESSAGES}:IncomingMessages._sort", "in self._wanted[sender] if", "in reversed(self._wanted[sender]) if"
    ),
    "the last of those not yet received": Planted(
        f"{MESSAGES}:IncomingMessages.receive",
        "enumerate(self._unmatched[sender])",
        "reversed([*enumerate(self._unmatched[sender])])",
    ),
    "done without being complete": Planted(f"{WORK}:Pending.wait", "if not self.done:", "if self.done:"),
}


def everything() -> None:
    not_a_number_is_seen()
    meet_late()
    if dist.get_rank() < 2:
        exchange_messages()
    run_programs(100)
    check_large((700_001,), 4)


def not_a_number_is_seen() -> None:
    assert all(value != value for row in not_a_number() for value in row)


def is_seen(timeout: float = 20.0) -> bool:
    try:
        run_ranks(4, everything, timeout=timeout)
    except RankFailure as failure:
        assert any(sign in str(failure) for sign in SEEN), failure
        return True
    return False


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", list(NATIVE)[:: 1 if WHOLE_MATRIX else 4])
def test_native_defect_is_seen(name: str, tmp_path: Path) -> None:
    defect = NATIVE[name]
    with in_use(compiled(tmp_path, defect.where, defect.old, defect.new)):
        assert is_seen()


@pytest.mark.parametrize("name", IN_PYTHON)
def test_defect_in_python_is_seen(name: str) -> None:
    defect = IN_PYTHON[name]
    with planted(defect.where, defect.old, defect.new):
        assert is_seen()


def test_without_a_defect_nothing_is_seen() -> None:
    assert not is_seen(timeout=120.0)
