"""Batch sizes of a step schedule are those of Megatron Core's calculator, on two and four ranks."""

from __future__ import annotations

import pytest

from megatron_core.config import TrainingConfig
from tests.hub import megatron_training as theirs

pytestmark = pytest.mark.skipif(not theirs.MEGATRON.is_dir(), reason="megatron-core is not installed")
SCHEDULES = {
    "tokens": ("0:8 1.5K:16 3K:32", 10),
    "sizes that fall again": ("0:16 2K:48 3K:24", 16),
    "the first step crosses two thresholds": ("0:64 100:8 200:16", 8),
}
STEPS = 40


def sizes_of_megatron(micro_batch: int) -> dict[str, list[int]]:
    """The batch sizes of the first steps by Megatron Core."""
    from torch import distributed as dist

    from megatron.core import num_microbatches_calculator as calculator

    sizes: dict[str, list[int]] = {}
    for name, (schedule, length) in SCHEDULES.items():
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(
            rank=dist.get_rank(),
            global_batch_size=None,
            micro_batch_size=micro_batch,
            data_parallel_size=dist.get_world_size(),
            step_batch_size_schedule=schedule,
            seq_length=length,
        )
        sizes[name] = []
        for _ in range(STEPS):
            calculator.update_num_microbatches(sum(sizes[name]), consistency_check=True)
            sizes[name].append(calculator.get_num_microbatches() * micro_batch * dist.get_world_size())
    return sizes


def test_steps_have_the_batch_sizes_of_megatron() -> None:
    micro_batch = 2
    found = theirs.ranks_of_megatron(
        theirs.load_megatron, {ranks: (sizes_of_megatron, micro_batch) for ranks in (2, 4)}
    )
    for ranks, of_ranks in found.items():
        for name, (schedule, length) in SCHEDULES.items():
            training = TrainingConfig(
                micro_batch_size=micro_batch, step_batch_size_schedule=(schedule,), train_samples=10_000
            )
            growth = training.batch_growth(ranks, length)
            ours: list[int] = []
            for _ in range(STEPS):
                ours.append(growth.at(sum(ours)))
            assert all(of_rank[name] == ours for of_rank in of_ranks), (name, ranks)
            assert len({*ours}) > 1
