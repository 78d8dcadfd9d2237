"""Rows of the parity matrix with simulated ranks: they compute what one process computes, as ranks in processes do."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.verify import assemble
from megatron_core.verify.bounds import Bounds
from megatron_core.verify.gpt import train_traced
from megatron_core.verify.ranks import run_simulated
from tests.parity.every_row import EVERY_ROW
from tests.parity.rows import BASE, baseline_of
from tests.parity.test_matrix import faults


@pytest.mark.drawn(2)
@pytest.mark.parametrize("row", list(EVERY_ROW)[::5])
def test_simulated_ranks_compute_what_one_process_computes(row: str) -> None:
    world_size, model, layout = EVERY_ROW[row]
    config = RunConfig.from_flat(BASE | model | layout)
    found = run_simulated(world_size, train_traced, config, 3, finish=assemble).result
    assert faults(found, baseline_of(BASE | model), Bounds("float64")) == []
