"""The moving average of the weights follows its formula, in every layout, in checkpoints and in exports."""

from __future__ import annotations

from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
import torch
import transformers

from megatron_core.config import RunConfig
from megatron_core.config.validate import check
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.averages import weights
from megatron_core.features.background_saves import snapshot
from megatron_core.hub.conversion import export_hugging_face
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.training.loop import evaluate_split
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import run_ranks, this_world
from tests.defects.plant import planted
from tests.runs import tiny_config, tiny_run
from tests.training.trl_1_16 import inputs

DECAY, STEPS = 0.7, 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero1": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "dp2 zero3, muon": {"zero_stage": 3, "optimizer": "muon"},
}


def _config(folder: Path, **settings: Any) -> RunConfig:
    if not (folder / "config.json").exists():
        inputs.save_inputs(folder)
    common = {
        "load_hf": str(folder),
        "mock_data": True,
        "seq_length": 16,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "eval_iters": 2,
        "train_iters": STEPS,
        "lr": 1e-2,
        "lr_decay_style": "constant",
        "ema_decay": DECAY,
        "fp64": True,
        "kernel_backend": "reference",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return RunConfig.from_flat(config_of_folder(folder).flat() | common | settings)


class Events:
    """Keeps evaluations in place of all callbacks."""

    def __init__(self) -> None:
        self.losses: dict[str, float] = {}

    def call(self, name: str, event: Any) -> None:
        self.losses[event.split] = event.loss


def _evaluated(run: Run) -> dict[str, float]:
    events = Events()
    evaluate_split(run, events, "validation")  # type: ignore[arg-type]
    return events.losses


def _losses(config: RunConfig) -> dict[str, float]:
    """Train, evaluate twice with the same result, and save if the configuration has a folder for that."""
    run = set_up(config, this_world())
    for _ in range(run.state.iteration, run.total_iterations):
        train_step(run)
    found = _evaluated(run)
    assert found["validation"] == evaluate(run, run.splits.valid, 2), "the weights are restored"
    if config.checkpoint.save is not None:
        run.saver.save(run.state)
        run.saver.close()
    return found


def _by_formula(config: RunConfig) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """The losses of one process, and the averages, from the weights after each step."""
    run = set_up(config, this_world())
    model = run.stages[0]
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(STEPS):
        train_step(run)
        for name, p in model.named_parameters():
            averages[name] = DECAY * averages[name] + (1 - DECAY) * p.detach()
    found = {"validation": evaluate(run, run.splits.valid, 2)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(averages[name])
    return found | {"validation average": evaluate(run, run.splits.valid, 2)}, averages


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_average_follows_the_formula(layout: str, tmp_path: Path) -> None:
    muon = {"optimizer": "muon"} if "muon" in layout else {}
    ((expected, _),) = run_ranks(1, _by_formula, _config(tmp_path, **muon))
    assert expected["validation average"] != pytest.approx(expected["validation"], rel=1e-4)
    for found in run_ranks(1 if layout == "one process" else 2, _losses, _config(tmp_path, **LAYOUTS[layout])):
        assert found == pytest.approx(expected, rel=1e-9)


def test_average_is_that_of_the_main_weights() -> None:
    """And not of the 16-bit weights, whose rounding is larger than the changes of many steps."""
    run = tiny_run(bf16=True, ema_decay=DECAY, lr=1e-5)
    shards = run.optimizer.shards
    averages = [shard.main.clone() for shard in shards]
    for _ in range(STEPS):
        train_step(run)
        averages = [DECAY * average + (1 - DECAY) * shard.main for average, shard in zip(averages, shards, strict=True)]
    for shard, average in zip(shards, averages, strict=True):
        assert shard.is_narrow
        torch.testing.assert_close(shard.state["ema"], average, rtol=1e-5, atol=1e-9)


DEFECTS = {
    "averages of other ranks are not gathered": (
        "dp2 zero1",
        "features.averages.weights:replaced_weights",
        "    gather_weights([data])\n    try:",
        "    try:",
    ),
    "averages start at 0": ("tp2 sp", "optimizer.sharded:Optimizer.start_averages", "copy_(shard.main)", "zero_()"),
    "an average is that of the weights before the update": (
        "pp2",
        "optimizer.sharded:Optimizer.step",
        "self._update_all(lr, decoupled_lr, weight_decay, factor)",
        "self._update_averages(); self._update_all(lr, decoupled_lr, weight_decay, factor)",
    ),
}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_is_found(name: str, tmp_path: Path) -> None:
    layout, *change = DEFECTS[name]
    ((expected, _),) = run_ranks(1, _by_formula, _config(tmp_path))
    with planted(*change):
        found = run_ranks(2, _losses, _config(tmp_path, **LAYOUTS[layout]))
    assert any(losses != pytest.approx(expected, rel=1e-9) for losses in found)


def test_checkpoint_resumes_and_exports_the_average(tmp_path: Path) -> None:
    """Saved in tp2, resumed with ZeRO 3 and exported: as if trained in one process without a break."""
    saved = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    ((expected, averages),) = run_ranks(1, _by_formula, _config(tmp_path))
    run_ranks(2, _losses, _config(tmp_path, **saved, **LAYOUTS["tp2 sp"], train_iters=2))
    for found in run_ranks(2, _losses, _config(tmp_path, **saved, zero_stage=3)):
        assert found == pytest.approx(expected, rel=1e-9)
    export_hugging_face(tmp_path / "run", tmp_path / "exported", average=True)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported", dtype=torch.float64)
    rows = averages["embedding.word_embeddings.weight"]
    torch.testing.assert_close(
        theirs.transformer.wte.weight, rows[: len(theirs.transformer.wte.weight)], atol=1e-9, rtol=0
    )


def test_average_starts_at_the_weights_of_a_checkpoint_without_one(tmp_path: Path, capfd) -> None:
    saved = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    run_ranks(1, _losses_without, _config(tmp_path, **saved, ema_decay=None, train_iters=2))
    with pytest.raises(CheckpointError, match="has no average of the weights"):
        export_hugging_face(tmp_path / "run", tmp_path / "exported", average=True)
    (found,) = run_ranks(1, _losses, _config(tmp_path, **saved, train_iters=2, ema_decay=0.5))
    assert found["validation"] == pytest.approx(found["validation average"], rel=1e-12)
    assert "the average of the weights starts at the weights of the checkpoint" in capfd.readouterr().out


def _losses_without(config: RunConfig) -> dict[str, float]:
    found = _losses(config)
    assert list(found) == ["validation"]
    return found


@pytest.mark.parametrize(
    "settings", [{"grad_compression": "onebit-lamb", "optimizer": "lamb"}, {"optimizer_offload_dir": "/tmp/state"}]
)
def test_contradictions(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used with ema_decay=0\.9"):
        check(tiny_config(ema_decay=0.9, **settings), 2)


def test_evaluation_waits_for_the_copy_of_a_checkpoint(tmp_path: Path) -> None:  # C44
    saved = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run"), "async_save": True}
    ((found, loaded),) = run_ranks(1, _evaluated_while_saving, _config(tmp_path, **saved, train_iters=2))
    assert found["validation"] != pytest.approx(found["validation average"], rel=1e-4)
    assert loaded == found


def _evaluated_while_saving(config: RunConfig) -> tuple[dict[str, float], dict[str, float]]:
    """The losses of a run while its checkpoint is copied, at the latest with the averages, and those after loading."""
    begin, end, copy, gather = Event(), Event(), snapshot._copy, weights.gather_weights

    def late(*pieces: object) -> None:
        if current_thread() is main_thread():
            return copy(*pieces)
        begin.wait(60)
        copy(*pieces)
        end.set()

    def copy_now(*_: object) -> None:
        begin.set()
        end.wait(60)

    run = set_up(config, this_world())
    for _ in range(2):
        train_step(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_copy", late)
        patch.setattr(weights, "gather_weights", lambda data: (gather(data), copy_now()))
        run.saver.save(run.state)
        run.optimizer.before_update = copy_now
        found = _evaluated(run)
        run.saver.close()
    return found, _evaluated(set_up(config, this_world()))
