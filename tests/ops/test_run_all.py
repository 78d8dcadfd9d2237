"""The program for compute-sanitizer, here with the checks of csrc/host_cuda."""

from __future__ import annotations

import pytest

from benchmarks.op_cases import CASES
from tests.ops import libraries
from tests.ops.run_all import run_all


def test_every_operation_keeps_to_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aligned and unaligned; an access outside of a tensor, or an unaligned one, is an error."""
    libraries.use(libraries.host_cuda, monkeypatch)
    finite = run_all([(2, 256), (1, 384)], [1, 7, 1030, *[39] * 70])
    assert finite == dict.fromkeys([*CASES, "casts to FP8", "lists of tensors"], True)
