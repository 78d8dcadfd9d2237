"""Weights gathered in FP8: half the bytes, and bitwise equal losses, norms and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.features.fp8.gather import start_fp8_gather
from megatron_core.features.fp8.part import FP8Part
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.settings import FP8Config, Recipe
from megatron_core.ops import Backend, native
from megatron_core.parallel.groups import ALONE
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.gpt import RaggedDataset
from megatron_core.verify.ranks import run_ranks, this_world
from megatron_core.verify.trace import RankTrace, assemble
from tests.defects.plant import planted
from tests.ops import libraries
from tests.parity.fp8_rows import BLOCKWISE, DELAYED, EXPERTS, HISTORY, SMALL, TENSORWISE, WIDE
from tests.parity.moe_rows import EP2
from tests.parity.rows import BASE, OVERLAP, SMALL_BUCKETS, TP2, ZERO, ZERO3

GATHER, NARROW = {"fp8_param_gather": True}, {"fp64": False, "bf16": True}
CASES = {
    "tensorwise, zero1": (2, SMALL | TENSORWISE, ZERO | SMALL_BUCKETS),
    "tensorwise, tp2 zero3": (4, SMALL | TENSORWISE, TP2 | ZERO3 | OVERLAP),
    "delayed, zero1": (2, SMALL | HISTORY, ZERO | OVERLAP),
    "delayed, experts, ep2 zero3": (4, EXPERTS | DELAYED, EP2 | ZERO3),
    "blockwise, zero3": (2, WIDE | BLOCKWISE, ZERO3),
}


def _train(settings: dict) -> tuple[RankTrace, dict[bool, int], int]:
    """Three steps; returns bytes of weights sent by this rank, with and without FP8, and the elements of a shard with
    FP8."""
    run = set_up(RunConfig.from_flat(settings), this_world())
    run.train_loader = run.loader(RaggedDataset(run.vocab_size, run.config.data.seq_length))
    trace, sent = RankTrace(), {True: 0, False: 0}
    hooks = StepHooks(before_update=lambda: trace.add_gradients(run.data_parallel, run.state.iteration))
    for _ in range(3):
        result = train_step(run, hooks=hooks)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
    if run.config.parallel.dp_zero_stage == 3:
        # Readers other than layers get exact weights. At stages 1 and 2 the model has the rounded ones.
        trace.add_weights(run.data_parallel, run.stages.values())
    for bucket in run.data_parallel.buckets:
        matrix = any("linear_" in name and name.endswith("weight") for name in bucket.names)
        assert (bucket.kind.start_gather is not None) == (matrix and run.config.training.fp8_param_gather)
        sent[matrix] += bucket.gathered_bytes
    return trace, sent, sum(layer.weight_is_narrow for layer in run.part(FP8Part).histories.layers.values())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes_and_half_the_bytes_travel(case: str) -> None:
    size, model, layout = CASES[case]
    settings = BASE | model | layout | NARROW
    assert list(problems(RunConfig.from_flat(settings | GATHER), size)) == []
    wide, narrow = (run_ranks(size, _train, settings | more) for more in ({}, GATHER))
    found, expected = assemble([trace for trace, *_ in narrow]), assemble([trace for trace, *_ in wide])
    assert found.faults == [] and found.losses == expected.losses and found.norms == expected.norms
    assert found.tensors.keys() == expected.tensors.keys()
    for name, values in expected.tensors.items():
        assert (found.tensors[name] == values).all(), name
    for (_, sent, layers), (_, before, none) in zip(narrow, wide, strict=True):
        assert before[True] > 0 and sent[True] <= before[True] / 2 * 1.02  # shards are padded
        assert layers > 0 and none == 0


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_casts_run_on_the_backend_of_the_layer(
    backend: Backend, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.use(libraries.cpu, monkeypatch)
    called, call = set(), native.call

    def counted(name: str, *given: object) -> None:
        called.add(name)
        call(name, *given)

    monkeypatch.setattr(native, "call", counted)
    weight = nn.Parameter(torch.randn(200, 256))
    weight.fp8 = FP8Products(FP8Config(fp8_format="e4m3", fp8_recipe=recipe), ALONE, ALONE, backend=backend)
    shard = weight.detach().flatten()
    _, sent = start_fp8_gather(shard.clone(), shard, [(weight, 0, len(shard), 0)], [(0, weight)], ALONE)
    assert called == ({"fp8_amax", "fp8_cast"} if backend == "native" else set()) and sent == len(shard)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("features.fp8.gather:_scales", "all_reduce_(flat, group, maximum=True)", "pass"),
        ("features.fp8.gather:QuantizationBlocks.rows", "row % height // (self.blocks.rows or height)", "0"),
        ("features.fp8.gather:_scales", "record=True", "record=False"),
    ],
)
def test_defects_are_found(target: str, old: str, new: str) -> None:  # C49
    """Scales per shard, blocks in another order, and weights whose amax is not recorded."""
    case = "delayed, zero1" if "record" in old else "blockwise, zero3"
    size, model, layout = CASES[case]
    settings = BASE | model | layout | NARROW
    expected = assemble([trace for trace, *_ in run_ranks(size, _train, settings)])
    with planted(target, old, new):
        found = assemble([trace for trace, *_ in run_ranks(size, _train, settings | GATHER)])
    assert found.losses != expected.losses or found.norms != expected.norms


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TENSORWISE, "zero_stage=0 gathers no weights"),
        (TENSORWISE | ZERO, "would overwrite the main weights"),
        ({"fp8_format": "e4m3", "fp8_recipe": "rowwise"} | ZERO3, "legal: tensorwise, delayed, blockwise"),
        ({}, "fp8_param_gather=True has no effect without --fp8-format"),
    ],
)
def test_what_it_needs(settings: dict, message: str) -> None:
    (found,) = problems(RunConfig.from_flat(BASE | SMALL | settings | GATHER), 2)
    assert message in found
