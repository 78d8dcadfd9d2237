"""Planted defects of ``fully_shard``: the comparison with FSDP2 finds each."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.test_fully_shard import _both
from tests.defects.plant import planted

ROWS, UNITS = "any_model.row_shards:", "any_model.row_units:RowUnits."
DEFECTS: dict[str, tuple[str, str, str, str]] = {
    "gradients are sums instead of means": (ROWS + "RowBucket._divisors", "size if", "1.0 if", "plain"),
    "each rank has the rows of the first": (
        *(ROWS + "ParameterRows.__init__", "choices.group.rank() * per_rank", "0 * per_rank", "plain"),
    ),
    "gathered weights are those of the first step": (
        *(ROWS + "RowBucket.release_weights", "self._has_started = False", "pass", "plain"),
    ),
    "a micro-batch replaces the gradients of the one before": (
        *(ROWS + "ParameterRows.keep_gradient", "self._kept.add_(gradient)", "self._kept = gradient", "accumulated"),
    ),
    "gradients of micro-batches are summed twice": (
        *(ROWS + "ParameterRows.take_gradient", "self._kept = None", "pass", "accumulated"),
    ),
    "gradients of a micro-batch without a sum are lost": (
        *(ROWS + "RowBucket.keep_gradients", "row.keep_gradient(self.choices.policy.reduce_dtype)"),
        *("row.whole.grad = None", "accumulated, kept"),
    ),
    "copies of the model are not summed": (
        *(ROWS + "RowBucket.finish_reduce", "all_reduce_(total, self.choices.instances)", "pass", "hybrid"),
    ),
    "sums are in the dtype of the weights": (
        *(ROWS + "RowBucket.start_reduce", "self.choices.policy.reduce_dtype or self.dtype", "self.dtype"),
        "bf16, sums in float32",
    ),
    "a frozen weight is trained": (
        *(ROWS + "ParameterRows.__init__", "requires_grad=parameter.requires_grad", "requires_grad=True", "frozen"),
    ),
    "the end of a backward sums nothing": (UNITS + "_end_backward", "self.finish_reduce()", "pass", "plain"),
    "an optimizer starts again in each step": (
        *("any_model.row_optimizer:_end_step", "optimizer.state[parameter] = {", "_ = {", "plain"),
    ),
}


def _difference(case: str) -> float:
    """The largest difference, relative to the largest entry; infinite for other results or an error."""
    largest = 0.0
    try:
        results = run_ranks(2 if case != "hybrid" else 4, _both, [case], backend="gloo", timeout=30.0)
    except RankFailure:
        return np.inf
    for ours, theirs in (result[case] for result in results):
        if ours.keys() != theirs.keys():
            return np.inf
        for name, value in theirs.items():
            if np.shape(ours[name]) != np.shape(value):
                return np.inf
            scale = max(np.abs(value).max(initial=0), 1e-3)
            largest = max(largest, float(np.abs(ours[name] - value).max(initial=0) / scale))
    return largest


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", DEFECTS)
def test_comparison_finds(name: str) -> None:
    target, old, new, case = DEFECTS[name]
    with planted(target, old, new):
        assert not _difference(case) < 1e-5


def test_the_rows_hold_without_defects() -> None:
    for case in ("plain", "accumulated"):
        assert _difference(case) < 1e-12
