"""Settings of Megatron-LM that change a training: schedules by samples, determinism, retained checkpoints, norms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_core.config.cli import write_config
from megatron_core.parallel import launch
from megatron_core.training import read_settings
from megatron_core.training.step import train_step
from tests.checkpoint.runs import save_run, start
from tests.runs import tiny_run


def test_rates_by_samples_follow_a_growing_batch():
    """Batches of 2, 4, 4 and 6 sequences: rates after 2, 6, 10 and 16 of 16 samples."""
    run = tiny_run(
        train_iters=None, train_samples=16, rampup_batch_size=(2, 2, 6), global_batch_size=6, lr=1.0, micro_batch_size=1
    )
    results = [train_step(run) for _ in range(3)]
    ends = [result.size.end for result in results]
    assert [result.learning_rate for result in results] == pytest.approx([1 - end / 16 for end in ends])
    assert len(set(result.size.batch_size for result in results)) > 1


def test_skipped_steps_do_not_move_the_rate_by_samples():
    run = tiny_run(train_iters=None, train_samples=64, lr_warmup_samples=32, lr=1.0)
    run.state.iteration, run.state.consumed_samples = 2, 16
    run.state.skipped_iterations, run.state.skipped_samples = 1, 8
    assert train_step(run).learning_rate == pytest.approx(16 / 32)


def test_deterministic_mode_turns_on_torchs_switch():
    try:
        losses = [train_step(tiny_run(deterministic_mode=True)).loss for _ in range(2)]
        assert torch.are_deterministic_algorithms_enabled()
        assert losses[0] == losses[1]
    finally:
        torch.use_deterministic_algorithms(False)


def test_sums_of_bfloat16_products_on_gpus():
    switches = torch.backends.cuda.matmul
    before = switches.allow_bf16_reduced_precision_reduction
    try:
        tiny_run(bf16=True)
        assert switches.allow_bf16_reduced_precision_reduction == before
        tiny_run(bf16=True, disable_bf16_reduced_precision_matmul=True)
        assert switches.allow_bf16_reduced_precision_reduction is False
    finally:
        switches.allow_bf16_reduced_precision_reduction = before


def test_checkpoints_between_retained_ones_are_deleted(tmp_path: Path):
    """Every step is saved; multiples of 2 and the newest are kept."""
    run = start({"save": str(tmp_path), "save_retain_interval": 2, "num_layers": 1})
    left = []
    for _ in range(4):
        train_step(run)
        save_run(run)
        left.append(sorted(int(folder.name[-1]) for folder in tmp_path.glob("iter_*")))
    assert left == [[1], [2], [2, 3], [2, 4]]


def test_the_schedule_may_come_from_the_checkpoint(tmp_path: Path):
    run = start({"save": str(tmp_path), "lr": 0.5, "weight_decay": 0.3, "lr_decay_iters": 7, "num_layers": 1})
    train_step(run)
    save_run(run)
    write_config(run.config, tmp_path / "run.yaml")
    flags = ["--config", str(tmp_path / "run.yaml"), "--load", str(tmp_path), "--lr", "0.1", "--adam-beta1", "0.8"]
    ours = read_settings("x", flags)[0].optimizer
    theirs = read_settings("x", [*flags, "--use-checkpoint-opt_param-scheduler"])[0].optimizer
    assert (ours.lr, theirs.lr, theirs.adam_beta1) == (0.1, 0.5, 0.8)
    empty = [*flags, "--use-checkpoint-opt_param-scheduler", "--load", str(tmp_path / "none")]
    assert read_settings("x", empty)[0].optimizer == ours


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norms_around_one_are_the_same_function(normalization: str):
    """1 + weight with weights initialized to 0: losses and weights of two steps, shifted by 1."""
    settings = {"normalization": normalization, "fp64": True, "qk_layernorm": True, "lr": 1e-2}
    plain, around = tiny_run(**settings), tiny_run(**settings, apply_layernorm_1p=True)
    for _ in range(2):
        assert train_step(plain).loss == pytest.approx(train_step(around).loss, rel=1e-12)
    ours = dict(around.stages[0].named_global_parameters())
    for name, parameter in plain.stages[0].named_global_parameters():
        shift = 1.0 if "layernorm.weight" in name else 0.0
        torch.testing.assert_close(parameter - shift, ours[name], rtol=0, atol=1e-12)
    assert any("layernorm.weight" in name for name in ours)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_may_have_their_own_deviation(tied: bool):
    """A separate output layer keeps the initialization of layers; a tied one is the embedding, also on another
    stage."""
    run = tiny_run(
        embedding_init_method_std=0.5,
        init_method_std=0.02,
        untie_embeddings_and_output_weights=not tied,
        vocab_size=512,
    )
    weights = dict(run.stages[0].named_global_parameters())
    deviations = {name: float(weights[name].detach().std()) for name in weights if name.endswith("embeddings.weight")}
    assert deviations and all(0.4 < std < 0.6 for std in deviations.values())
    layer = run.stages[0].output_layer
    assert (layer.weight is None) == tied
    if not tied:
        assert 0.015 < float(layer.weight.detach().std()) < 0.025


def test_nccl_without_gpus_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """GPU scripts run on a laptop, with a note about the backend."""
    chosen: list[str] = []
    monkeypatch.setattr(launch.dist, "init_process_group", lambda backend, **settings: chosen.append(backend))
    launch.join("nccl", "cpu", rank=0, world_size=2)
    assert "distributed_backend=nccl needs GPUs" in capsys.readouterr().err
    launch.join("auto", "cpu", rank=0, world_size=2)
    launch.join("nccl", "cuda", rank=0, world_size=2)
    assert capsys.readouterr().err == ""
    assert chosen[0] == chosen[1] and chosen[2] == "nccl"
