"""Ranks that run different modules: stages 0 to 3 equal torch in one process, or are an error on every rank."""

from __future__ import annotations

import re
import time
from functools import cache, partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import megatron_core
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.verify.ranks import RankFailure, run_ranks, run_simulated
from tests.any_model.awkward_models import (
    CASES,
    MICRO_BATCHES,
    LayerByRank,
    Result,
    block,
    difference,
    samples_of,
    train_with_engines,
    train_with_torch,
)
from tests.any_model.models import COMMON
from tests.defects.plant import planted
from tests.sample import WHOLE_MATRIX

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20}
ROWS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 0, overlap": {"overlap_grad_reduce": True, "ddp_bucket_size": 20},
    "stage 1": {"zero_stage": 1},
    "stage 1, overlap": {"zero_stage": 1, **OVERLAP},
    "stage 2": {"zero_stage": 2},
    "stage 2, overlap": {"zero_stage": 2, **OVERLAP},
    "stage 3": {"zero_stage": 3},
    "stage 3, overlap": {"zero_stage": 3, **OVERLAP},
    "stage 3, kept": {"zero_stage": 3, "zero3_keep_after_forward": True, **OVERLAP},
}
DIFFERENT = [name for name, case in CASES.items() if not case.zero3]
"""Models in which ranks run different units."""


@cache
def _reference(name: str, ranks: int = 2) -> Result:
    return train_with_torch(name, ranks)


def _cases(settings: dict[str, Any]) -> list[str]:
    return [name for name, case in CASES.items() if case.zero3 or settings.get("zero_stage") != 3]


def _train(names: list[str], settings: dict[str, Any]) -> dict[str, Result]:
    return {name: train_with_engines(name, dist.get_world_size(), dist.get_rank(), **settings) for name in names}


def _check(by_rank: list[dict[str, Result]], ranks: int = 2) -> None:
    found = {
        (name, rank): difference(each[name], _reference(name, ranks))
        for rank, each in enumerate(by_rank)
        for name in each
    }
    assert {key: value for key, value in found.items() if not value < 1e-12} == {}


@pytest.mark.every_case
@pytest.mark.parametrize("row", ROWS if WHOLE_MATRIX else [row for row in ROWS if row != "stage 1"])
def test_ranks_equal_torch(row: str) -> None:
    _check(run_ranks(2, _train, _cases(ROWS[row]), ROWS[row]))


@pytest.mark.parametrize("row", list(ROWS) if WHOLE_MATRIX else ["stage 2, overlap"])
@pytest.mark.parametrize("transport", ["gloo", "simulated"])
def test_other_transports(transport: str, row: str) -> None:
    names = _cases(ROWS[row]) if WHOLE_MATRIX else ["unequal layer by rank", "interleaved", "backward twice"]
    if transport == "gloo":
        _check(run_ranks(2, _train, names, ROWS[row], backend="gloo"))
    else:
        _check(run_simulated(2, _train, names, ROWS[row]).result)


@pytest.mark.parametrize("settings", [ROWS["stage 2"], {**ROWS["stage 2"], "num_distributed_optimizer_instances": 2}])
def test_four_ranks(settings: dict[str, Any]) -> None:
    names = ["LayerDrop", "experts as units", "decoder before encoder"]
    _check(run_ranks(4, _train, names, settings), 4)


# ZeRO 3 with different units.


def _errors(names: list[str], settings: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """The message of each model's error on this rank, and the seconds until it."""
    found = {}
    for name in names:
        start = time.monotonic()
        with pytest.raises((LayoutError, ConfigError)) as caught:
            train_with_engines(name, 2, dist.get_rank(), zero_stage=3, **settings)
        found[name] = str(caught.value), time.monotonic() - start
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("transport", ["shm", "gloo", "simulated"])
def test_different_units_are_an_error_on_every_rank(transport: str) -> None:
    if transport == "simulated":
        by_rank = run_simulated(2, _errors, DIFFERENT, {}).result
    else:
        by_rank = run_ranks(2, _errors, DIFFERENT, {}, backend=transport)
    for name in DIFFERENT:
        texts = [found[name][0] for found in by_rank]
        assert max(found[name][1] for found in by_rank) < 5.0
        if name == "weights without a call":
            assert all("is split over 2 ranks by ZeRO 3" in text for text in texts)
            continue
        assert texts[0] == texts[1]
        for rank in range(2):
            assert re.search(rf"rank {rank} (gathers|sums the gradients of|ends step)", texts[0]), texts[0]
    assert by_rank[0]["layer by rank"][0] == (
        "the ranks do not run the same units in the same order: rank 0 gathers layers.0 for a forward in step 1; "
        "rank 1 gathers layers.1 for a forward in step 1. Add to unit_classes the class of a module that contains "
        "these units and that all ranks run (the class of the model itself keeps all weights in memory during a "
        "forward and backward), or set zero_stage=2"
    )


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("row", ["stage 3, overlap", "stage 3, kept"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_different_units_with_overlap(name: str, row: str, backend: str) -> None:
    """A gather ahead of its unit may make the ranks agree; then the result is exact."""
    try:
        found = run_ranks(2, _train, [name], ROWS[row], backend=backend, timeout=10.0)
    except RankFailure as error:
        assert re.search(r"do not run the same units|is split over 2 ranks by ZeRO 3", str(error)), error
    else:
        _check(found)


# Calls that differ between ranks.


def _differing_calls(what: str, stage: int) -> str:
    config = {**COMMON, "global_batch_size": 2 * MICRO_BATCHES, "zero_stage": stage}
    rank = dist.get_rank()
    engine = megatron_core.initialize(LayerByRank().double(), config, unit_classes=[LayerByRank]).engine
    with pytest.raises(LayoutError) as caught:
        for sample in samples_of(0, 2, rank):
            if what == "evaluation" and rank == 0:
                engine(sample)
            engine.backward(engine(sample))
            if what == "zero_grad" and rank == 0 and engine.micro_step == 0:
                engine.zero_grad()
                engine.backward(engine(sample))
            if what == "boundary":
                engine.ends_step = partial(bool, rank == 0 or engine.micro_step == 1)
            engine.step()
        engine.full_state_dict()
    return str(caught.value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("what", "stage", "message"),
    [
        ("zero_grad", 2, r"rank 0 sums .* step 1; rank 1 ends step 1"),
        ("boundary", 2, r"rank 0 ends step 1; rank 1 sums the gradients of .* in step 1\. All ranks must call"),
        ("evaluation", 3, r"rank 0 gathers .* for a forward in step 1; rank 1 gathers .* for a backward in step 1"),
    ],
)
def test_calls_that_differ_between_ranks(what: str, stage: int, message: str) -> None:
    texts = run_ranks(2, _differing_calls, what, stage)
    assert texts[0] == texts[1]
    assert re.search(message, texts[0]), texts[0]


# Order of sums.


class _Reversed(LayerByRank):
    """Runs its layers in the reverse of their order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.extend(block() for _ in range(2))

    def hidden(self, sample: Any) -> Any:
        x = sample.x
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class _WithCache(LayerByRank):
    """Returns tensors from the middle of its layers, as a model with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(block(), block()) for _ in range(2))

    def forward(self, sample: Any) -> Any:
        x, cache = sample.x, []
        for first, second in self.layers:
            middle = first(x) * 1.0
            cache.append(middle)
            x = x + second(middle)
        return {"loss": self.head(x).square().mean(), "cache": cache}


def _late_by_step(kind: type[LayerByRank], stage: int) -> list[int]:
    config = {**COMMON, "global_batch_size": 2 * MICRO_BATCHES, "zero_stage": stage}
    engine = megatron_core.initialize(kind().double(), config).engine
    data: Any = engine.data_parallel
    late: list[int] = []
    own = data._late_buckets

    def counted() -> Any:
        found = own()
        late.append(len(found))
        return found

    data._late_buckets = counted
    for step in range(3):
        for sample in samples_of(step, 2, dist.get_rank()):
            output = engine(sample)
            engine.backward(output["loss"] if isinstance(output, dict) else output)
            engine.step()
    return late


def test_sums_follow_the_order_of_the_backward() -> None:
    """In the first step most gradients arrive after the sum of their unit, later none."""
    for late in run_ranks(2, _late_by_step, _Reversed, 2):
        assert late[0] > 0
        assert late[1:] == [0, 0]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_unit_is_left_once(stage: int) -> None:
    """Tensors from the middle of a unit in the model's output do not end its backward."""
    for late in run_ranks(2, _late_by_step, _WithCache, stage):
        assert late == [0, 0, 0]


SYNC = "data_parallel.unit_sync:UnitSync."
DEFECTS: dict[str, tuple[str, str, str, str, str]] = {
    "units are summed when the backward leaves them": (
        *(SYNC + "_reduce", "if self._unreduced is None:", "if True:"),
        *("unequal layer by rank", "stage 2"),
    ),
    "late gradients are lost": (
        *("any_model.agreement:Agreement.end_step", "flags = [int(", "flags = [0 * int("),
        *("interleaved", "stage 2"),
    ),
    "late gradients are added to the sum of all ranks": (
        *("any_model.agreement:AgreeingDataParallel._takes_late", "return bucket.reduced and", "return False and"),
        *("backward twice", "stage 0, overlap"),
    ),
    "ranks do not compare what they gather": (
        *("any_model.agreement:Announcement.is_equal", "highest == -lowest", "True"),
        *("layer by rank", "stage 3"),
    ),
    "gradients of another engine's loss are divided twice": (
        "any_model.backward:EngineBackward._begin_direct",
        "self.loss_scale / self._micro_batches / running._factor",
        "1 / self._micro_batches",
        *("joint loss of two engines", "stage 1"),
    ),
    "zero_grad keeps the gradients": (
        *("any_model.backward:EngineBackward.zero_grad", "self.discard_gradients()", "pass"),
        *("GAN", "stage 2"),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_comparison_finds(defect: str) -> None:
    target, old, new, name, row = DEFECTS[defect]
    with planted(target, old, new):
        try:
            found = run_ranks(2, _train, [name], ROWS[row], timeout=10.0)
        except RankFailure as error:
            assert "do not run the same units" not in str(error) or row != "stage 3"
            return
    assert max(difference(each[name], _reference(name)) for each in found) > 1e-9
