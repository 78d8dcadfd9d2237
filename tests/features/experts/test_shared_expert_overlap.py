"""Computing shared experts during the all-to-all changes no bit."""

from __future__ import annotations

import numpy as np

from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.parity.moe_rows import DEEPSEEK, EP2, ETP1, SP, TP2
from tests.runs import tiny_run


def _train(settings: dict) -> tuple[list[float], list[np.ndarray]]:
    run = tiny_run(**DEEPSEEK | {"bf16": True} | settings)
    losses = [train_step(run).loss for _ in range(3)]
    return losses, [shard.main.numpy().copy() for shard in run.optimizer.shards]


def _both(layout: dict) -> list[tuple[list[float], list[np.ndarray]]]:
    return [_train(layout | {"moe_shared_expert_overlap": overlap}) for overlap in (False, True)]


def test_overlap_changes_no_bit() -> None:
    for layout in (EP2, TP2 | SP | EP2 | ETP1):
        for plain, overlapped in run_ranks(2, _both, layout):
            assert overlapped[0] == plain[0]
            for found, expected in zip(overlapped[1], plain[1], strict=True):
                np.testing.assert_array_equal(found, expected)
