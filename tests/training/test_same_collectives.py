"""All members of a group call the same collectives on tensors of the same shape, in the same order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatron_core.parallel import collectives
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

Log = dict[tuple[int, ...], list[tuple]]
UNEVEN = {"num_layers": 5, "untie_embeddings_and_output_weights": True}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "ddp_bucket_size": 2000}
PP2, TP2 = {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}
V2 = {"num_virtual_stages_per_pipeline_rank": 2}
LAYOUTS: dict[str, tuple[int, dict]] = {
    "3 layers, pp2": (2, {"num_layers": 3} | PP2),
    "untied, pp4": (4, UNEVEN | {"pipeline_model_parallel_size": 4}),
    "tp2 pp2 sp x 2 chunks": (4, {"num_layers": 4, "sequence_parallel": True} | TP2 | PP2 | V2),
    "dp2 pp2 zero1": (4, {"num_layers": 3} | SHARDED | PP2),
}


def _recorded(name: str, collective: Callable, log: Log) -> Callable:
    def call(*tensors, group=None, **settings):
        shapes = [(tuple(x.shape), str(x.dtype)) for x in tensors]
        log[tuple(dist.get_process_group_ranks(group or dist.group.WORLD))].append((name, *shapes))
        return collective(*tensors, group=group, **settings)

    return call


def _step_and_evaluate(settings: dict) -> Log:
    run = tiny_run(**settings)
    log: Log = defaultdict(list)
    dist.all_reduce = _recorded("all-reduce", dist.all_reduce, log)
    collectives._all_gather = _recorded("all-gather", collectives._all_gather, log)
    collectives._reduce_scatter = _recorded("reduce-scatter", collectives._reduce_scatter, log)
    train_step(run)
    evaluate(run, run.splits.valid, 1)
    return dict(log)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_members_of_a_group_call_the_same_collectives(layout: str) -> None:  # C41 C64
    """Also for metrics: stages without a loss reduce a tensor of the last stage's shape."""
    ranks, settings = LAYOUTS[layout]
    logs = run_ranks(ranks, _step_and_evaluate, settings, timeout=45.0)  # different shapes may also cause a hang
    assert len(logs[0][tuple(range(ranks))]) >= 2, "a step and an evaluation reduce what they report over all ranks"
    for group in {group for log in logs for group in log}:
        first, *others = (logs[rank].get(group) for rank in group)
        assert others == [first] * len(others), f"ranks {group}"
