"""Planted defects of the engine and its wrapper: the comparison with torch finds each."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.models import Result, difference, train_with_engine, train_with_torch
from tests.defects.plant import planted

ENGINE, DATA = "any_model.engine:Engine.", "any_model.data:"
SYNC = "data_parallel.unit_sync:"
ZERO2: dict[str, Any] = {"zero_stage": 2}
ZERO3: dict[str, Any] = {"zero_stage": 3}
DEFECTS = {
    "losses are not divided by the micro-batches": (
        *(ENGINE + "_micro_batches", "self.gradient_accumulation_steps * (", "1 * ("),
        {},
    ),
    "losses are not divided by the ranks": (ENGINE + "_micro_batches", 'self.groups.size("dp")', "1", {}),
    "each micro-batch ends a step": (
        ENGINE + "__init__",
        "self.micro_step + 1 == self.gradient_accumulation_steps",
        "True",
        {},
    ),
    "gradients of the last step remain": (ENGINE + "discard_gradients", "self.data_parallel.zero_grad()", "pass", {}),
    "gradients are not summed over the ranks": (
        ENGINE + "_update",
        "finish_gradients(data, self._after_gradients)",
        "pass",
        {},
    ),
    "weights of other shards stay outdated": (
        "training.driver:gather_weights",
        "data.start_param_sync()",
        "pass",
        ZERO2,
    ),
    "reported losses are those of this rank": (
        ENGINE + "_update",
        "all_reduce_(totals",
        "(lambda *x: None)(totals",
        {},
    ),
    "the norm is not used": (ENGINE + "_update", "[data], norm, rate", "[data], 1e-9, rate", {}),
    "the learning rate of the first step is 0": (
        ENGINE + "_set_rates",
        "self.state.iteration + 1",
        "self.state.iteration",
        {"lr_warmup_iters": 1},
    ),
    "micro-batches of a rank are neighbours": (
        *(DATA + "_Positions.__iter__", "first + loader.rank * size, loader.epoch_samples, together"),
        "first + loader.rank * loader.epoch_samples // 2, loader.epoch_samples * (1 + loader.rank) // 2, size",
        {},
    ),
    "every rank reads the samples of rank 0": (DATA + "_Positions.__iter__", "loader.rank * size", "0", {}),
    "vectors have weight decay": (
        "any_model.optimizer:groups_of",
        "config.weight_decay * decays",
        "config.weight_decay",
        {},
    ),
    "weights of the root are freed after the first unit": (
        SYNC + "UnitSync.__init__",
        "outer_reads + reads",
        "reads",
        ZERO3,
    ),
    "sums of several micro-batches replace one another": (
        *("data_parallel.buffer:Bucket.finish_reduce", "self.sum_shard.add_(total)", "self.sum_shard.copy_(total)"),
        ZERO2,
    ),
    "tied weights are gathered by one unit only": (
        "data_parallel.fill:buckets_of_unit",
        "sharded_weights(own_buckets + buckets_read)",
        "sharded_weights(own_buckets)",
        ZERO3,
    ),
    "outputs other than tuples are not watched": (
        *(SYNC + "UnitSync._watch", "in tensors_in(output)", "in (output if isinstance(output, tuple) else ())"),
        ZERO3,
    ),
    "a unit used twice in a forward is freed after its first use": (
        *(SYNC + "UnitSync._enter_forward", "if self._forward is not unit", "if self._passed is None"),
        ZERO3,
    ),
}


@pytest.fixture(scope="module")
def reference() -> Result:
    return train_with_torch("tangled")


@pytest.mark.parametrize("name", DEFECTS)
def test_comparison_finds(name: str, reference: Result) -> None:
    target, old, new, settings = DEFECTS[name]
    with planted(target, old, new):
        try:
            found = run_ranks(2, _train, settings, timeout=20.0)
        except RankFailure:
            return  # an error is found, too
    assert max(difference(result, reference) for result in found) > 1e-9


def test_the_rows_hold_without_defects(reference: Result) -> None:
    rows = [settings for *_, settings in DEFECTS.values()]
    for settings in [each for number, each in enumerate(rows) if each not in rows[:number]]:
        if "lr_warmup_iters" not in settings:
            for result in run_ranks(2, _train, settings):
                assert difference(result, reference) < 1e-9


def _train(settings: dict[str, Any]) -> Result:
    return train_with_engine("tangled", **settings)
