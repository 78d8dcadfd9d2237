"""Planted defects of pipeline stages: the comparison with torch finds each."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.layered import train_placed, train_whole
from tests.any_model.models import Result, difference, model_of, train_in_stages, train_with_torch
from tests.defects.plant import planted

ENGINE, CUT = "any_model.pipeline:PipelineEngine.", "any_model.cut:ModelCut."
LAYERS, MESSAGES = "any_model.layers:", "any_model.messages:StructuredMessages."
STEPS = 3
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2, "global_batch_size": 4}
ZERO3: dict[str, Any] = PP2 | {"zero_stage": 3}
# Of a model of layers, whose table is on both stages.
DEFECTS: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    "tied gradients are not summed over the stages": (
        *("data_parallel.early_sums:_sum_over_model_axes", "all_reduce_(grads, groups.tied(bucket.kind.tied))", "pass"),
        *(2, PP2),
    ),
    "a copy of a tied weight is counted in the norm": (
        *("any_model.stages:mark_tied", "is_copy=stage_to_rank[min(holder.stages)] !=", "is_copy=-1 =="),
        *(2, PP2),
    ),
    "a layer runs on both of two stages": (
        *("any_model.partition:stage_ranges", "[range(start, stop)", "[range(max(start - 1, 0), stop)"),
        *(2, PP2),
    ),
    "a message is used before it has arrived": (
        *("pipeline_parallel.executor:Executor._take_input", "handle.wait()", "pass"),
        *(2, PP2),
    ),
    "every stage computes the first micro-batch": (ENGINE + "_forward_step", "micros[micro]", "micros[0]", 2, PP2),
    "labels are those of the micro-batch before": (
        *(ENGINE + "_forward_step", "self._loss_in(output, batch,", "self._loss_in(output, micros[micro - 1],"),
        *(2, PP2),
    ),
    "losses are not divided by the micro-batches": (
        ENGINE + "train_batch",
        "torch.full((), count",
        "torch.full((), 1",
        2,
        PP2,
    ),
    "only the first gradient of a message is sent back": (
        *(MESSAGES + "trained", "if grad]", "if grad][:1]"),
        *(2, PP2),
    ),
    "all layers begin with the same random numbers": (
        *(LAYERS + "PipelineModule._build", "{self.seed} {number}", "{self.seed}"),
        *(2, PP2),
    ),
    "a function uses a tied weight that is not gathered": (
        *(LAYERS + "PipelineModule.place", "_Use(layer, spec.forward_fn)", "partial(spec.forward_fn, layer)"),
        *(4, ZERO3),
    ),
    "the learning rate is that of the step before": (
        *("any_model.engine:Engine._set_rates", "self.state.iteration + 1", "self.state.iteration"),
        *(2, PP2 | {"train_iters": 8, "lr_warmup_iters": 1}),
    ),
    "the last micro-batch is left out": (
        *(
            "any_model.engine:Engine.gradient_accumulation_steps",
            "self.global_batch_size",
            "-4 + self.global_batch_size",
        ),
        *(2, PP2 | {"global_batch_size": 8}),
    ),
}
# Of GPT-2 in automatic stages.
CUT_DEFECTS: dict[str, tuple[str, str, str]] = {
    "a stage ends one layer early": (
        CUT + "pass_on",
        "if number >= passage.layers.stop:",
        "if number >= len(self.layers):",
    ),
    "the layer before a stage passes NaN on": (CUT + "pass_on", "passage.layers.start - 1", "passage.layers.start"),
    "a tied weight belongs to the first stage alone": (
        CUT + "_find_places",
        "(parameter, set()).update(using)",
        "(parameter, using)",
    ),
    "the head belongs to the first stage": (CUT + "_find_places", "final if is_head else 0", "0"),
    "parameters of another stage are used": (CUT + "_active", "if stage in self._users[module] else nothing", ""),
}


@pytest.fixture(scope="module")
def layers() -> dict[int, Result]:
    return {size: train_whole(size, STEPS) for size in (4, 8)}


@pytest.mark.parametrize("name", DEFECTS)
def test_comparison_finds(name: str, layers: dict[int, Result]) -> None:
    target, old, new, ranks, settings = DEFECTS[name]
    with planted(target, old, new):
        _expect_difference(ranks, partial(train_placed, STEPS, settings, {}), layers[settings["global_batch_size"]])


@pytest.fixture(scope="module")
def gpt2() -> Result:
    model_of("gpt2")
    return train_with_torch("gpt2", 4, STEPS)


@pytest.mark.parametrize("name", CUT_DEFECTS)
def test_comparison_of_a_cut_model_finds(name: str, gpt2: Result) -> None:
    with planted(*CUT_DEFECTS[name]):
        _expect_difference(2, partial(train_in_stages, "gpt2", STEPS, PP2), gpt2)


def test_the_rows_hold_without_defects(layers: dict[int, Result], gpt2: Result) -> None:
    for settings, ranks in ((PP2, 2), (ZERO3, 4)):
        for result in run_ranks(ranks, train_placed, STEPS, settings, {}):
            assert difference(result, layers[4]) < 1e-9
    for result in run_ranks(2, train_in_stages, "gpt2", STEPS, PP2):
        assert difference(result, gpt2) < 1e-9


def _expect_difference(ranks: int, train: Any, expected: Result) -> None:
    try:
        found = run_ranks(ranks, train, timeout=20.0)
    except RankFailure:
        return  # an error is found, too
    assert max(difference(result, expected) for result in found) > 1e-9
