"""Any layout loads any checkpoint; a resumed run equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_core import parallel_state
from megatron_core.errors import CheckpointError
from megatron_core.training.setup import Run
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import MODERN, compare, save_run, start, stored, train
from tests.sample import WHOLE_MATRIX

TP2, TP4 = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 4}
CP2 = {"context_parallel_size": 2}
PP2, PP4 = {"pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}
V2, SP, ZERO = (
    {"num_virtual_stages_per_pipeline_rank": 2},
    {"sequence_parallel": True},
    {"use_distributed_optimizer": True},
)
# name: (ranks, settings)
LAYOUTS: dict[str, tuple[int, dict]] = {
    "1": (1, {}),
    "dp2 zero1": (2, ZERO),
    "tp4": (4, TP4),
    "pp4": (4, PP4),
    "dp4 zero1": (4, ZERO),
    "dp2 zero3": (2, {"zero_stage": 3}),
    "dp4 zero2": (4, {"zero_stage": 2}),
    "tp2 dp2 zero3": (4, TP2 | {"zero_stage": 3, "overlap_grad_reduce": True, "overlap_param_gather": True}),
    "tp2 dp2 zero1": (4, TP2 | ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "cp2 dp2 zero1": (4, CP2 | ZERO),
    "cp2 tp2": (4, CP2 | TP2),
    "pp2 x 2 chunks, dp2": (4, PP2 | V2),
    "tp2 pp2 sp x 2 chunks": (4, TP2 | PP2 | SP | V2),
    "pp4, a rank without parameters": (4, PP4 | {"pipeline_model_parallel_layout": "Et*3||t|L"}),
}
SAVERS = (
    "1",
    "tp2 dp2 zero1",
    "tp2 dp2 zero3",
    "cp2 dp2 zero1",
    "pp2 x 2 chunks, dp2",
    "pp4, a rank without parameters",
)
# All of them with WHOLE_MATRIX=1, otherwise the second of each and one layout itself; ``test_every_pair`` has others.
LOADERS = {
    "1": ("tp4", "tp2 pp2 sp x 2 chunks"),
    "tp2 dp2 zero1": ("tp2 dp2 zero1", "pp4", "dp2 zero3", "1"),
    "tp2 dp2 zero3": ("tp2 dp2 zero3", "dp4 zero2"),
    "cp2 dp2 zero1": ("cp2 dp2 zero1", "cp2 tp2", "1"),
    "pp2 x 2 chunks, dp2": ("pp2 x 2 chunks, dp2", "tp4", "dp4 zero1"),
    "pp4, a rank without parameters": ("pp4, a rank without parameters", "tp4"),
}
JOURNEYS = [(saver, loader) for saver in SAVERS for loader in (LOADERS[saver] if WHOLE_MATRIX else LOADERS[saver][1:2])]
JOURNEYS += [] if WHOLE_MATRIX else [("tp2 dp2 zero3", "tp2 dp2 zero3")]
MODELS = {"tied": {}, "modern": MODERN}


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def _save(model: dict, layouts: tuple[str, ...], root: Path) -> None:
    """Two steps, a checkpoint, two more steps, another checkpoint."""
    for name in layouts:
        run = start(model | LAYOUTS[name][1] | {"save": str(root / name)})
        for _ in range(2):
            train(run, 2)
            folder = save_run(run)
            if dist.is_initialized():
                dist.barrier()
            compare(run, stored(folder))


def _load(model: dict, journeys: list[tuple[str, str]], root: Path) -> None:
    for saver, loader in journeys:
        run = start(model | LAYOUTS[loader][1] | {"load": str(root / saver), "ckpt_step": 2})
        assert (run.state.iteration, run.state.consumed_samples, run.optimizer.steps_taken) == (2, 8, 2)
        seen = compare(run, stored(root / saver / "iter_0000002"))
        kinds = {"model", "optimizer"} if run.data_parallel.buckets else set()
        assert {name.split(".")[0] for name in seen} == kinds
        train(run, 2)
        # C61: the same layout continues bitwise; another one sums in a different order.
        compare(run, stored(root / saver / "iter_0000004"), tolerance=0.0 if saver == loader else 1e-9)


@pytest.mark.parametrize("model", ["tied", pytest.param("modern", marks=pytest.mark.whole_matrix)])
def test_any_layout_loads_any_checkpoint(model: str, tmp_path: Path) -> None:  # C28 C31 C42 C54 C61
    """Weights and optimizer state equal the saved ones, and the next two steps those of the other run."""
    for world in (1, 4):
        savers = tuple(name for name in SAVERS if LAYOUTS[name][0] == world)
        _in_world(world, _save, MODELS[model], savers, tmp_path)
    for world in sorted({LAYOUTS[loader][0] for _, loader in JOURNEYS}):
        _in_world(world, _load, MODELS[model], [pair for pair in JOURNEYS if LAYOUTS[pair[1]][0] == world], tmp_path)
    first, *others = (stored(tmp_path / saver / "iter_0000004") for saver in SAVERS)
    for other in others:  # C42: stored tensors do not depend on the rank that stored them
        assert other.keys() == first.keys()
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def _in_world(size: int, function, *args) -> None:
    if size == 1:
        function(*args)
    else:
        run_ranks(size, function, *args)


def _layers(run: Run) -> Iterator[tuple[int, nn.Module]]:
    """This rank's layers in execution order, each with its number in the whole model."""
    for stage, model in run.stages.items():
        yield from zip(run.layers[stage], model.decoder.layers.values(), strict=True)


def _check_layers(root: Path) -> None:
    """Layer n is filled with n + 1 in one layout, and has this value in others. # C54"""
    names = ("pp2 x 2 chunks, dp2", "tp4", "pp4")
    run = start(LAYOUTS[names[0]][1] | {"save": str(root)})
    for number, layer in _layers(run):
        for parameter in layer.parameters():
            parameter.data.fill_(number + 1)
    save_run(run)
    for name in names:
        run = start(LAYOUTS[name][1] | {"load": str(root)})
        for number, layer in _layers(run):
            assert all(bool((parameter == number + 1).all()) for parameter in layer.parameters()), (name, number)


def test_layers_land_in_their_places(tmp_path: Path) -> None:
    run_ranks(4, _check_layers, tmp_path)
    run = start({"load": str(tmp_path)})
    assert [number for number, _ in _layers(run)] == [0, 1, 2, 3]
    for number, layer in _layers(run):
        assert all(bool((parameter == number + 1).all()) for parameter in layer.parameters())


def _check_fused(root: Path) -> None:
    """Rows of gate and up, and of queries, keys and values, by hand. # C42"""
    run = start(MODERN | TP4 | {"load": str(root)})
    rank = dist.get_rank()
    for number, layer in _layers(run):
        fc1 = layer.mlp.linear_fc1.weight  # gate 32 rows, up 32 rows
        rows = [*range(8 * rank, 8 * rank + 8), *range(32 + 8 * rank, 32 + 8 * rank + 8)]
        assert fc1[:, 0].tolist() == [1000 * number + row for row in rows]
        qkv = layer.self_attention.linear_qkv.weight  # two groups of 2 queries, key and value, 4 rows each
        group, query = 16 * (rank // 2), 16 * (rank // 2) + 4 * (rank % 2)
        rows = [*range(query, query + 4), *range(group + 8, group + 16)]
        assert qkv[:, 0].tolist() == [1000 * number + row for row in rows]


def test_fused_matrices_are_taken_apart_rightly(tmp_path: Path) -> None:
    run = start(MODERN | {"save": str(tmp_path)})
    for number, layer in _layers(run):
        for matrix in (layer.mlp.linear_fc1.weight, layer.self_attention.linear_qkv.weight):
            matrix.data.copy_(1000 * number + torch.arange(matrix.shape[0])[:, None].expand_as(matrix))
    save_run(run)
    run_ranks(4, _check_fused, tmp_path)


ONE_LAYER = {"num_layers": 1}


def test_finetune_takes_the_weights_alone(tmp_path: Path) -> None:
    run = start(ONE_LAYER | {"save": str(tmp_path)})
    train(run, 2)
    saved = stored(save_run(run))
    run = start(ONE_LAYER | {"load": str(tmp_path), "finetune": True})
    assert (run.state.iteration, run.state.consumed_samples, run.optimizer.steps_taken) == (0, 0, 0)
    compare(run, {name: t if name.startswith("model.") else torch.zeros_like(t) for name, t in saved.items()})


def test_checkpoint_without_optimizer(tmp_path: Path) -> None:
    run = start(ONE_LAYER | {"save": str(tmp_path), "no_save_optim": True})
    train(run, 2)
    saved = stored(save_run(run))
    assert saved and all(name.startswith("model.") for name in saved)
    with pytest.raises(CheckpointError, match=r"no state of --optimizer adam.*--no-load-optim"):
        start(ONE_LAYER | {"load": str(tmp_path)})
    run = start(ONE_LAYER | {"load": str(tmp_path), "no_load_optim": True})
    assert (run.state.iteration, run.optimizer.steps_taken) == (2, 0)
    for name, parameter in run.stages[0].named_global_parameters():
        assert torch.equal(parameter[: saved[f"model.{name}"].shape[0]], saved[f"model.{name}"]), name


@pytest.mark.parametrize("dtype", [{"bf16": True}, {"fp16": True}])
def test_main_weights_are_what_counts(dtype: dict, tmp_path: Path) -> None:
    """16-bit runs resume from their float32 main weights; a float32 run can load a 16-bit checkpoint."""
    model = ONE_LAYER | {"fp64": False}
    run = start(model | dtype | {"save": str(tmp_path), "initial_loss_scale": 1024.0})
    train(run, 2)
    saved = stored(save_run(run))
    scale = run.optimizer.loss_scale.state_dict()
    run = start(model | dtype | {"load": str(tmp_path)})
    compare(run, saved)
    assert run.optimizer.loss_scale.state_dict() == scale
    run = start(model | {"load": str(tmp_path)})
    for name, parameter in run.stages[0].named_global_parameters():
        main = saved[f"optimizer.main.{name}"]
        assert torch.equal(parameter[: main.shape[0]], main), name
    # and main weights from weights, if only these were stored
    run = start(model | {"save": str(tmp_path / "wide")})
    wide = stored(save_run(run))
    run = start(model | dtype | {"load": str(tmp_path / "wide")})
    for _, tensors in run.optimizer.tensors():
        assert "main" in tensors
    compare(run, _as_16_bit(wide, next(iter(run.stages[0].parameters())).dtype))


def _as_16_bit(wide: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    mains = {name.replace("model.", "optimizer.main.", 1): t for name, t in wide.items() if name.startswith("model.")}
    return {name: t.to(dtype) if name.startswith("model.") else t for name, t in wide.items()} | mains


def test_padding_of_the_vocabulary_is_not_stored(tmp_path: Path) -> None:  # C21
    run = start(ONE_LAYER | {"save": str(tmp_path)})
    name = "embedding.word_embeddings.weight"
    assert dict(run.stages[0].named_global_parameters())[name].shape[0] == 104
    assert stored(save_run(run))[f"model.{name}"].shape[0] == 101
