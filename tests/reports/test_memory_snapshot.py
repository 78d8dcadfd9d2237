"""Memory snapshots on SIGUSR2, and the message of a run that is out of memory."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.errors import MegatronError
from megatron_core.parallel.exit_status import allocation_that_failed
from megatron_core.planner.explain import predicted_bytes, settings_that_fit
from megatron_core.planner.layout_settings import with_settings
from megatron_core.reports import memory_report
from megatron_core.reports.dry_run import RankEstimate
from megatron_core.reports.memory_report import KeptForBackward, MemorySnapshots, largest_tensors
from megatron_core.training.loop import train
from megatron_core.training.step import train_step
from tests.runs import tiny_run

SIZES = {"hidden_size": 64, "seq_length": 128, "vocab_size": 512, "micro_batch_size": 4, "attention_backend": "auto"}


def test_what_is_kept_for_backward_is_freed_by_it() -> None:
    run = tiny_run(**SIZES)
    kept = KeptForBackward(run)
    with kept.watching():
        train_step(run)
    assert kept.peak > 0 and sum(kept._now.values()) == 0
    assert sum(kept.at_peak.values()) == kept.peak
    assert any(name.startswith("decoder.layers.1.") for name in kept.at_peak)
    formula = RankEstimate.of(run.config, 1).bytes_by_kind["activations"]
    assert kept.peak == pytest.approx(formula, rel=0.2)
    before = kept.peak
    train_step(run)
    assert kept.peak == before, "hooks are gone"


def test_watching_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    losses = []
    for watched in (False, True):
        run = tiny_run(**SIZES)
        snapshots = MemorySnapshots(run)
        snapshots._wanted = watched
        snapshots.before_step()
        snapshots.after_step(train_step(run))
        losses.append(train_step(run).loss)
    assert losses[0] == losses[1]


def test_a_signal_asks_for_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory_report, "LARGEST", 10**6)  # other tests of this process may keep larger ones
    run = tiny_run(**SIZES, train_iters=3, eval_iters=0)
    before = signal.getsignal(signal.SIGUSR2)
    stage = run.stages[0]
    handle = stage.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    stage.register_forward_pre_hook(lambda *_: handle.remove())
    train(run, [])
    assert signal.getsignal(signal.SIGUSR2) is before
    (path,) = (tmp_path / "memory").iterdir()
    assert path.name == "rank00000_step0000002.json", "the signal came in the first step"
    found = json.loads(path.read_text())
    assert found["bytes"]["activations"] == sum(found["activations"].values()) > 0
    sizes = [each["bytes"] for each in found["tensors"]]
    assert sizes == sorted(sizes, reverse=True)
    whats = " ".join(each["what"] for each in found["tensors"])
    assert all(f"{kind} of " in whats for kind in ("weights", "gradients", "exp_avg"))
    monkeypatch.undo()
    assert len(largest_tensors(run)) == memory_report.LARGEST
    assert f"memory of rank 0 in {path.relative_to(tmp_path)}" in capsys.readouterr().out


def test_the_end_of_memory_names_what_held_it_and_what_would_fit(tmp_path: Path) -> None:
    run = tiny_run(**SIZES, train_iters=3, eval_iters=0, save=str(tmp_path))
    taken = []

    def allocate(*_: object) -> None:
        taken.append(1)
        if len(taken) == 3:
            torch.empty(2**60, dtype=torch.uint8)

    run.stages[0].decoder.register_forward_hook(allocate)
    with pytest.raises(MegatronError, match=r"out of memory while allocating 1048576 TiB") as error:
        train(run, [])
    text = str(error.value)
    assert re.search(r"Rank 0 held weights [\d.]+ KiB, gradients [\d.]+ KiB, optimizer", text)
    needed = predicted_bytes(run.config, 1, run.vocab_size)
    ways = settings_that_fit(run.config, 1, run.vocab_size, 0.9 * needed)
    assert len(ways) == 3 and text.count("(") == 4
    for change, size in ways:
        assert size <= 0.9 * needed
        built = RankEstimate.of(with_settings(run.config, change), 1)
        assert sum(built.bytes_by_kind.values()) == pytest.approx(size, rel=0.03)
    assert json.loads((tmp_path / "memory" / "rank00000_step0000002.json").read_text())["step"] == 2
    assert "out of memory" in (tmp_path / "failures.jsonl").read_text()


def test_settings_that_fit_on_several_ranks() -> None:
    config = RunConfig.from_flat(SIZES | {"num_layers": 4, "num_attention_heads": 4, "hidden_size": 256,
                                          "mock_data": True, "global_batch_size": 32, "train_iters": 1})  # fmt: skip
    needed = predicted_bytes(config, 4, 512)
    ways = settings_that_fit(config, 4, 512, 0.5 * needed)
    assert len(ways) == 3 and all(size <= 0.5 * needed for _, size in ways)
    assert settings_that_fit(config, 4, 512, 1.0) == []


def test_errors_that_mean_memory() -> None:
    known = {
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.": 4096,
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB": 2 * 2**30,
        "std::bad_alloc": 0,
        "a bug of ours": None,
    }
    assert {text: allocation_that_failed(RuntimeError(text)) for text in known} == known
    assert allocation_that_failed(MemoryError("Unable to allocate 1.5 KiB for an array")) == 1536
