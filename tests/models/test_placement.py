"""Every parameter is placed as in its ``ShardSpec``, in all layouts, also after training."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from megatron_core.parallel.sharding import ShardSpec
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

Held = tuple[str, ShardSpec | None, np.ndarray]

TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
PP2, SP = {"pipeline_model_parallel_size": 2}, {"sequence_parallel": True}
ZERO = {"use_distributed_optimizer": True}
ROPE = {"position_embedding_type": "rope", "qk_layernorm": True}
GATED = ROPE | {"swiglu": True, "ffn_hidden_size": 32, "normalization": "RMSNorm", "add_qkv_bias": True}
UNTIED = {"untie_embeddings_and_output_weights": True, "disable_bias_linear": True}
ONE_GROUP = {"group_query_attention": True, "num_query_groups": 1}
TWO_GROUPS = {"group_query_attention": True, "num_query_groups": 2}
# name: (ranks, model, layout); every element is held by one data-parallel rank's shard or there is only one such rank
CASES: dict[str, tuple[int, dict, dict]] = {
    "tp4 sp": (4, {}, TP4 | SP),
    "tied, tp2 pp2": (4, {"embedding_init_method_std": 0.3}, TP2 | PP2),
    "dp2 tp2 zero1": (4, GATED, TP2 | ZERO),
    "gated, untied, 2 groups, tp2 pp2 sp": (4, GATED | UNTIED | TWO_GROUPS, TP2 | PP2 | SP),
    "gated, 1 group, tp4": (4, GATED | ONE_GROUP, TP4),
    "2 groups, tp4 sp": (4, ROPE | TWO_GROUPS, TP4 | SP),
}
BASE = {"fp64": True, "micro_batch_size": 2, "global_batch_size": 4, "hidden_size": 16, "init_method_std": 0.1}


def _train(settings: dict) -> tuple[list[Held], int]:
    """This rank's tensors after two steps, and the number of elements that it counts in a norm."""
    run = tiny_run(**BASE | settings)
    for _ in range(2):
        train_step(run)
    run.data_parallel.finish_param_sync()
    held = [
        (name, getattr(parameter, "shard_spec", None), parameter.detach().numpy().copy())
        for stage in run.stages.values()
        for name, parameter in stage.named_global_parameters()
    ]
    ranges = [span for bucket in run.data_parallel.buckets for span in bucket.owned_ranges()]
    return held, sum(stop - start for start, stop in ranges)


def _check(name: str, spec: ShardSpec | None, local: np.ndarray, whole: np.ndarray, covered: np.ndarray) -> None:
    """Compare a rank's tensors with their declared positions, and mark these positions as covered."""
    assert spec is not None, f"{name} does not say how it is split"
    assert (spec.global_shape, spec.local_shape) == (whole.shape, local.shape), name
    close = {"rtol": 1e-9, "atol": 1e-9, "err_msg": name}
    padding = local.copy()
    for part in spec.parts:
        np.testing.assert_allclose(local[part.local.index], whole[part.whole.index], **close)
        covered[part.whole.index], padding[part.local.index] = True, 0.0
    assert not padding.any(), f"padding of {name}"


@pytest.mark.parametrize("case", CASES)
def test_parameters_lie_where_they_are_declared(case: str) -> None:  # C16
    """One process has the whole tensors; a part declared at a wrong position would be trained differently."""
    ranks, model, layout = CASES[case]
    alone, _ = run_ranks(1, _train, model)[0]
    baseline = {name: whole[: spec.global_shape[0]] for name, spec, whole in alone}
    results = run_ranks(ranks, _train, model | layout)
    covered = {name: np.zeros(whole.shape, dtype=bool) for name, whole in baseline.items()}
    for held, _ in results:
        for name, spec, local in held:
            _check(name, spec, local, baseline[name], covered[name])
    assert [name for name, seen in covered.items() if not seen.all()] == []
    assert sum(owned for _, owned in results) == sum(prod(whole.shape) for whole in baseline.values())
