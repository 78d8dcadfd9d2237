"""Optimizers other than AdamW: against torch's or a formula, and equal in all layouts."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from megatron_core.errors import ConfigError
from megatron_core.features.offload import placement
from megatron_core.optimizer.rule import Rates
from megatron_core.optimizer.shard import UpdateJob
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.memory import give_back, needs_proc, resident, start_anew
from tests.runs import tiny_run

ROUNDED = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "bf16",
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}
WITH_MOMENTUM = {"optimizer": "sgd", "bf16": True}
WITHOUT_MOMENTUM = WITH_MOMENTUM | {"sgd_momentum": 0.0}
ROUNDED_MUON = ROUNDED | {"optimizer": "muon", "main_params_dtype": "fp32"}


@pytest.mark.parametrize("scalar", ["adam", "lion"])
def test_muon_trains_hidden_matrices_alone(scalar: str) -> None:
    run = tiny_run(optimizer="muon", muon_scalar_optimizer=scalar)
    names = {type(shard.algorithm).__name__: shard.bucket.names for shard in run.optimizer.shards}
    assert all("embedding" not in name and name.endswith("weight") for name in names["Muon"])
    assert len(names["Muon"]) == 2 * 4
    kinds = {type(shard.algorithm).__name__ for shard in run.optimizer.shards}
    assert kinds == {"Muon", {"adam": "AdamW", "lion": "Lion"}[scalar]}


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "settings",
    [WITH_MOMENTUM, WITHOUT_MOMENTUM, {"optimizer": "lion"}, {"optimizer": "muon"}, ROUNDED, ROUNDED_MUON],
    ids=["sgd", "sgd without momentum", "lion", "muon", "rounded adam", "rounded muon"],
)
def test_a_resumed_run_is_the_run(settings: dict, tmp_path: Path) -> None:  # C61
    settings = settings | {"save": str(tmp_path)}
    run = tiny_run(**settings)
    for _ in range(2):
        train_step(run)
    run.saver.save(run.state)
    expected = [train_step(run).loss for _ in range(2)]
    resumed = tiny_run(**settings, load=str(tmp_path))
    assert [train_step(resumed).loss for _ in range(2)] == expected


def test_decoupled_learning_rate_is_of_embeddings_and_output() -> None:
    """The embedding changes by its own rate in the first step, all other parameters as without it."""
    settings = {"clip_grad": 0.0, "untie_embeddings_and_output_weights": True, "weight_decay": 0.0}
    runs = [tiny_run(**settings, **own) for own in ({}, {"decoupled_lr": 1e-4})]
    start = {n: p.detach().clone() for n, p in runs[0].stages[0].named_parameters()}
    for run in runs:
        train_step(run)
    plain, own = (dict(run.stages[0].named_parameters()) for run in runs)
    for name, first in start.items():
        ratio = 1e-2 if name.startswith(("embedding", "output_layer")) else 1.0
        torch.testing.assert_close(own[name] - first, ratio * (plain[name] - first), rtol=1e-2, atol=1e-6, msg=name)


def test_clipping_by_value() -> None:
    run = tiny_run(
        optimizer="sgd", clip_grad=0.0, clip_grad_value=1e-4, weight_decay=0.0, lr=1.0, lr_decay_style="constant"
    )
    before = [shard.main.clone() for shard in run.optimizer.shards]
    train_step(run)
    moves = torch.cat([old - shard.main for old, shard in zip(before, run.optimizer.shards, strict=True)])
    assert moves.abs().max() == pytest.approx(1e-4, rel=1e-2)
    assert (moves.abs() > 0.99e-4).float().mean() > 0.1


LARGE = {"num_layers": 6, "hidden_size": 384, "num_attention_heads": 6, "vocab_size": 128, "micro_batch_size": 1}


def _grown(settings: dict) -> tuple[int, int, int]:
    """Memory of a model in training: growth of the peak by its steps relative to setup, and its state's bytes."""
    placement.CHUNK = 2**18
    train_step(tiny_run())
    start_anew()
    before = resident("VmRSS")
    run = tiny_run(**LARGE | settings)
    peak = resident("VmHWM")
    for _ in range(2):
        train_step(run)
    state = sum(tensor.nbytes for _, named in run.optimizer.tensors() for tensor in named.values())
    risen = resident("VmHWM") - peak
    give_back()
    return resident("VmRSS") - before, risen, state


@needs_proc
def test_state_on_disk_is_in_memory_a_chunk_at_a_time(tmp_path: Path) -> None:
    """Weights and gradients are 85 MB and the moments as much, of which only a few chunks are in memory."""
    (inside, by_steps, state), (away, risen, _) = (
        run_ranks(1, _grown, settings)[0] for settings in ({}, {"optimizer_offload_dir": str(tmp_path)})
    )
    assert state > 80e6
    assert away < inside - 0.8 * state
    # Both trainings need memory for activations, 14 MB, of which setup may have had as much or not.
    assert risen < by_steps + 0.1 * state


def _losses(settings: dict) -> list[float]:
    run = tiny_run(**settings)
    return [train_step(run).loss for _ in range(4)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({}, 0),
        pytest.param({}, 3, marks=pytest.mark.whole_matrix),
        pytest.param({"bf16": True}, 0, marks=pytest.mark.whole_matrix),
        ({"bf16": True}, 3),
        ({"bf16": True, "optimizer": "muon"}, 3),
    ],
    ids=str,
)
def test_state_on_disk_changes_no_bit(settings: dict, stage: int, tmp_path: Path) -> None:
    shared = settings | {"zero_stage": stage, "ddp_bucket_size": 5000}
    plain = run_ranks(2, _losses, shared)
    for part in ({}, {"optimizer_offload_fraction": 0.5}):
        assert run_ranks(2, _losses, shared | {"optimizer_offload_dir": str(tmp_path)} | part) == plain
    assert run_ranks(2, _losses, shared | {"optimizer_cpu_offload": True}) == plain
    assert list(tmp_path.iterdir()) == []
    if stage == 3:
        folders = {"optimizer_offload_dir": str(tmp_path), "zero3_param_offload_dir": str(tmp_path)}
        for overlap in (False, True):
            both = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
            assert run_ranks(2, _losses, shared | folders | both) == plain


def _fail(place: str, folder: str) -> str:
    """The error of a step in which reading or writing fails on this rank."""
    run = tiny_run(optimizer_offload_dir=folder, **({"zero_stage": 3, "zero3_param_offload_dir": folder}))
    train_step(run)
    if torch.distributed.get_rank() == 1:
        return ""  # the error must not need the other rank
    if place == "write":
        placement.os.pwritev = _refuse
    else:
        shard = run.optimizer.shards[0] if place == "read state" else None
        held = run.data_parallel.buckets[0].placement if shard is None else shard.placement
        for file, _ in held._files.values():
            os.ftruncate(file.fileno(), 0)
    shards, rates = run.optimizer.shards, Rates(2, 0.1, 0.0, 1.0)
    jobs = [UpdateJob(shard, at, rates) for shard in shards for at in shard.chunks(slice(0, shard.main.numel()))]
    with pytest.raises(ConfigError) as caught:
        run.optimizer._updates.run(jobs, run.optimizer._update_part)
    return str(caught.value)


def _refuse(*args: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("read state", r"^optimizer_offload_dir=.*: reading [\d,]+ bytes failed: the file ends early; give a folder"),
        ("read weights", r"^zero3_param_offload_dir=.*: reading [\d,]+ bytes failed: the file ends early; give"),
        ("write", r"_dir=.*: writing [\d,]+ bytes failed: .*No space left on device; give a folder on another disk"),
    ],
)
def test_errors_of_the_disk_reach_the_main_thread(place: str, expected: str, tmp_path: Path) -> None:
    message = run_ranks(2, _fail, place, str(tmp_path))[0]
    assert re.search(expected, message) and "\n" not in message


@needs_proc
@pytest.mark.drawn(0)
def test_weights_on_disk_are_in_memory_a_unit_at_a_time(tmp_path: Path) -> None:
    """One rank: weights and gradients are 43 MB each, of which the weights are also released."""
    folders = {"optimizer_offload_dir": str(tmp_path)}
    (kept, _, state), (away, _, _) = (
        run_ranks(1, _grown, folders | own)[0]
        for own in ({}, {"zero_stage": 3, "zero3_param_offload_dir": str(tmp_path)})
    )
    assert away < kept - 0.8 * state / 2


def test_one_rank_with_weights_on_disk_learns_the_same(tmp_path: Path) -> None:
    folders = {"optimizer_offload_dir": str(tmp_path), "zero3_param_offload_dir": str(tmp_path), "zero_stage": 3}
    assert _losses(folders) == _losses({})
    assert list(tmp_path.iterdir()) == []
