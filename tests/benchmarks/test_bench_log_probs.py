"""Chunks of logits need less memory than complete logits."""

from __future__ import annotations

import pytest

from benchmarks.bench_log_probs import CHUNKS, measure
from megatron_core.verify.ranks import run_ranks
from tests.memory import needs_proc

TOKENS = 512
COMPLETE = 4 * TOKENS * 49152


@needs_proc
@pytest.mark.parametrize("call", ["log_probs", "train_on"])
def test_chunks_need_less_memory(call: str) -> None:
    ((complete, _),) = run_ranks(1, measure, call, {}, TOKENS, 1)
    ((chunks, _),) = run_ranks(1, measure, call, CHUNKS, TOKENS, 1)
    assert complete > 0.95 * COMPLETE
    assert complete - chunks > 0.4 * COMPLETE
