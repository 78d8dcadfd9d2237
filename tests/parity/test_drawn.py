"""Rows of settings drawn at random, against one process (see ``drawn_rows``)."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.verify import trace_training
from tests.parity.drawn_layouts import JOINT, LAYOUT, LOSSY, NOT_DRAWN, PRECISION
from tests.parity.drawn_rows import compared, described, faults
from tests.parity.drawn_settings import BASE, MODEL
from tests.sample import WHOLE_MATRIX


@pytest.mark.drawn(2)
@pytest.mark.parametrize("number", range(3000, 3200) if WHOLE_MATRIX else (1035, 1073, 2079))
def test_a_drawn_row_computes_what_one_process_computes(number: int) -> None:
    found = compared(number)
    assert found == [], described(number)


def test_each_setting_is_drawn_or_has_a_reason() -> None:
    choices = [choice for rows in (MODEL, PRECISION, LAYOUT, JOINT, LOSSY) for _, options in rows for choice in options]
    drawn = set(BASE).union(*choices)
    not_drawn = [name for names in NOT_DRAWN.values() for name in names.split()]
    assert drawn.isdisjoint(not_drawn) and len(set(not_drawn)) == len(not_drawn)
    assert drawn.union(not_drawn) == RunConfig().flat().keys()


@pytest.mark.whole_matrix  # 6 GB and half a minute
@pytest.mark.parametrize("bucket_size", [1_000_000, 50_000_000])
def test_a_buffer_of_forty_million_elements(bucket_size: int) -> None:
    """One parameter that is larger than a bucket, or fits into one with others."""
    large = {"vocab_size": 1_250_003, "num_layers": 1, "seq_length": 3, "global_batch_size": 2, "hidden_size": 32}
    shared = BASE | large | {"optimizer": "sgd"}
    layout = {"zero_stage": 1, "ddp_bucket_size": bucket_size, "overlap_grad_reduce": True}
    baseline = trace_training(RunConfig.from_flat(shared), 1, 1)
    assert list(faults(trace_training(RunConfig.from_flat(shared | layout), 2, 1), baseline)) == []
