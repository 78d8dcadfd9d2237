"""Hashes of a training's state in split layouts, compared with hashes of the gathered tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.data_parallel import Bucket
from megatron_core.reports import state_hashes
from megatron_core.reports.hash_records import HashRecord
from megatron_core.reports.hash_sums import combined, tensor_hash
from megatron_core.reports.state_hashes import HashedSteps, StateHashes
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from megatron_core.verify.trace import RankTrace, assemble
from tests.runs import tiny_run

GQA = {"group_query_attention": True, "num_query_groups": 1, "normalization": "RMSNorm", "qk_layernorm": True}
EXPERTS = {"num_experts": 4}
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
LAYOUTS = {
    "dp2": (2, {}),
    "dp2 zero1": (2, {"use_distributed_optimizer": True}),
    "dp2 zero3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
    "pp2 x 2 chunks, tied": (2, {PP: 2, "num_layers": 4, "num_virtual_stages_per_pipeline_rank": 2}),
    "tp2 sp, shared keys, bfloat16": (2, {TP: 2, "sequence_parallel": True, "bf16": True, **GQA}),
    "tp2 dp2 zero1, shared keys": (4, {TP: 2, "use_distributed_optimizer": True, "ddp_bucket_size": 900, **GQA}),
    "ep2 dp2": (2, {"expert_model_parallel_size": 2, **EXPERTS}),
    "cp2": (2, {"context_parallel_size": 2}),
}


def hashed_step(run: Run) -> tuple[HashRecord, RankTrace]:
    """The record of a step, and its gradients and weights."""
    hashed = HashedSteps(StateHashes(run.stages, run.data_parallel, run.optimizer, run.groups), by_tensor=True)
    trace = RankTrace()

    def before_update() -> None:
        hashed.before_update(1)
        trace.add_gradients(run.data_parallel, 0)

    result = train_step(run, hooks=StepHooks(before_update=before_update))
    record = hashed.after_step(result.loss, result.grad_norm)
    trace.losses, trace.norms = [result.loss], [result.grad_norm]
    trace.add_weights(run.data_parallel, run.stages.values())
    return record, trace


def one_step(settings: dict) -> tuple[HashRecord, RankTrace]:
    return hashed_step(tiny_run(**settings))


def gathered(traces: list[RankTrace], weight_dtype: torch.dtype) -> dict[str, dict[str, str]]:
    """Hashes of whole tensors, assembled from all ranks in float64."""
    trace = assemble(traces)
    assert not trace.faults
    found: dict[str, dict[str, str]] = {"gradients": {}, "weights": {}}
    for label, values in trace.tensors.items():
        kind, _, name = label.partition(".")
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if kind == "grad0":
            found["gradients"][name] = tensor_hash(tensor.to(torch.float32))
        elif kind == "weight":
            found["weights"][name] = tensor_hash(tensor.to(weight_dtype))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_sums_over_ranks_give_the_hash_of_the_gathered_tensor(name: str) -> None:
    world, settings = LAYOUTS[name]
    records, traces = zip(*run_ranks(world, one_step, settings), strict=True)
    expected = gathered(list(traces), torch.bfloat16 if "bf16" in settings else torch.float32)
    assert all(record == records[0] for record in records) and not records[0].differing_copies
    for kind, hashes in expected.items():
        assert records[0].by_tensor[kind] == hashes
        assert getattr(records[0], kind) == combined(hashes.items())
    states = records[0].by_tensor["optimizer"]
    assert len(states) == len(expected["weights"]) * (3 if "bf16" in settings else 2)


def test_initial_state_is_equal_in_all_layouts() -> None:
    def initial(settings: dict) -> HashRecord:
        run = tiny_run(num_layers=4, **settings)
        state = StateHashes(run.stages, run.data_parallel, run.optimizer, run.groups)
        return HashedSteps(state, by_tensor=True).initial(0)

    expected = initial({})
    for settings in ({PP: 2}, {TP: 2}, {"use_distributed_optimizer": True}):
        found = run_ranks(2, initial, settings)
        assert found == [expected, expected]
        # The order is that of the model, in every layout.
        assert list(found[0].by_tensor["weights"]) == list(expected.by_tensor["weights"])


def damaged(settings: dict, rank: int, name: str) -> HashRecord:
    """The record of the state after one bit of a weight has changed on one rank."""
    run = tiny_run(**settings)
    for stage in run.stages.values():
        weight = dict(stage.named_global_parameters()).get(name)
        if weight is not None and dist.get_rank() == rank:
            weight.data.view(-1).view(torch.int32)[3] ^= 1
    state = StateHashes(run.stages, run.data_parallel, run.optimizer, run.groups)
    return HashedSteps(state, by_tensor=True).initial(0)


NORM, EMBEDDING = "decoder.layers.0.input_layernorm.weight", "embedding.word_embeddings.weight"


@pytest.mark.parametrize(
    ("settings", "rank", "name"),
    [({}, 1, NORM), ({TP: 2}, 1, NORM), ({PP: 2}, 1, EMBEDDING), ({}, 0, EMBEDDING)],
    ids=["dp2", "tp2", "tied", "owner"],
)
def test_copies_that_differ_are_named(settings: dict, rank: int, name: str) -> None:
    found = run_ranks(2, damaged, settings, rank, name)
    assert all(f"weights: {name}" in record.differing_copies for record in found)


def _moved(piece: TensorBox) -> TensorBox:
    """The piece, one row earlier if there is room."""
    if piece.box.start[0] == 0:
        return piece
    return replace(piece, box=piece.box.shifted((-1, *(0 for _ in piece.box.start[1:]))))


def _with_defect(defect: str, bucket: Bucket, pieces: Iterable[TensorBox]) -> list[TensorBox]:
    found = [replace(piece, owned=piece.owned and bucket.is_writer) for piece in pieces]
    if defect == "copies are counted":
        return [replace(piece, owned=True) for piece in found]
    if dist.get_rank() == 0:
        return found
    return [_moved(piece) for piece in found] if defect == "a shard is moved" else found[1:]


@pytest.mark.parametrize("defect", ["copies are counted", "a shard is left out", "a shard is moved"])
def test_comparison_finds_planted_defects(defect: str) -> None:
    layout = {TP: 2} if defect == "copies are counted" else {"use_distributed_optimizer": True}
    with patch.object(state_hashes, "_counted", partial(_with_defect, defect)):
        records, traces = zip(*run_ranks(2, one_step, layout), strict=True)
    expected = gathered(list(traces), torch.float32)
    assert records[0].by_tensor["weights"] != expected["weights"]
    assert records[0].by_tensor["gradients"] != expected["gradients"]
