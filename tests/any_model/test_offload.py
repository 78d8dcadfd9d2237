"""Engines with state on disk, compressed gradients, activation checkpointing and saving in the background."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Timer, current_thread, main_thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatron_core
from megatron_core.errors import MegatronError
from megatron_core.features.background_saves import snapshot
from megatron_core.verify.ranks import run_ranks
from tests.any_model.models import (
    BATCH,
    COMMON,
    Result,
    call,
    difference,
    loss_in,
    model_of,
    samples_of,
    throughout_float64,
    train_with_engine,
    train_with_torch,
)
from tests.defects.plant import planted


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1, "optimizer_offload_dir": "state"},
        {"zero_stage": 3, "zero3_param_cpu_offload": True},
        {"zero_stage": 3, "zero3_param_offload_dir": "weights", "optimizer_offload_dir": "state"},
    ],
    ids=["optimizer", "weights-in-host-memory", "weights"],
)
def test_files_change_no_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    folders = {name: str(tmp_path / value) if name.endswith("dir") else value for name, value in settings.items()}
    inside = {name: value for name, value in settings.items() if name == "zero_stage"}
    offloaded, plain = run_ranks(2, _train, "gpt2", folders), run_ranks(2, _train, "gpt2", inside)
    for a, b in zip(offloaded, plain, strict=True):
        assert difference(a, b) == 0.0


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(name, **settings)


def test_compressed_gradients_equal_the_plain_ones_until_the_warm_up_ends() -> None:
    settings = {"grad_compression": "powersgd", "grad_compression_warmup_iters": 2, "powersgd_rank": 1}
    found, plain = (run_ranks(2, _train, "llama", each)[0] for each in (settings, {}))
    assert found["losses"][:3] == plain["losses"][:3]
    assert any((found["weights"][name] != plain["weights"][name]).any() for name in plain["weights"])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_activation_checkpointing_of_transformers(stage: int) -> None:
    for found in run_ranks(2, _with_activation_checkpointing, stage):
        assert difference(found, train_with_torch("llama")) < 1e-9


def _with_activation_checkpointing(stage: int) -> Result:
    model = model_of("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    config = {**COMMON, "global_batch_size": BATCH, "zero_stage": stage}
    engine, _, loader, _ = megatron_core.initialize(model, config, training_data=samples_of("llama"), shuffle=False)
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    losses, norms = [], []
    for batch in loader:
        with throughout_float64(engine):
            engine.backward(loss_in(engine(**batch)))
        if (report := engine.step()) is not None:
            losses.append(report.loss)
            norms.append(report.grad_norm)
    assert calls == 2 * len(loader), "forward and recomputation"
    weights = {name: tensor.numpy() for name, tensor in engine.full_state_dict().items()}
    return {"losses": losses, "norms": norms, "weights": weights}


def test_saving_in_the_background(tmp_path: Path) -> None:
    weights = run_ranks(2, _saved_in_the_background, str(tmp_path))[0]
    for name, tensor in _loaded(str(tmp_path)).items():
        np.testing.assert_array_equal(tensor, weights[name])


def _saved_in_the_background(folder: str) -> dict[str, np.ndarray]:
    config = {**COMMON, "global_batch_size": BATCH, "zero_stage": 2, "async_save": True}
    engine, _, loader, _ = megatron_core.initialize(model_of("gpt2"), config, training_data=samples_of("gpt2"))
    saved: dict[str, np.ndarray] = {}
    for batch in loader:
        engine.backward(loss_in(engine(**batch)))
        if engine.step() is not None and engine.state.iteration == 2:
            engine.save_checkpoint(folder)  # the next step must not change what is written
            saved = {name: tensor.numpy().copy() for name, tensor in engine.full_state_dict().items()}
    engine.finish_saving()
    return saved


def _loaded(folder: str) -> dict[str, np.ndarray]:
    engine = megatron_core.initialize(model_of("gpt2"), {**COMMON, "global_batch_size": BATCH}).engine
    engine.load_checkpoint(folder)
    assert engine.state.iteration == 2
    return {name: tensor.numpy() for name, tensor in engine.full_state_dict().items()}


def _check_saved_buffers(folder: str) -> None:
    """Save in the background with a copy that starts after the next forward, which changes running statistics."""
    config = {**COMMON, "global_batch_size": 1, "async_save": True}
    engine, _, loader, _ = megatron_core.initialize(
        model_of("convolutions"), config, training_data=samples_of("convolutions")
    )
    begin, copy = Event(), snapshot._copy

    def late(*pieces: object) -> None:
        assert current_thread() is main_thread() or begin.wait(60)
        copy(*pieces)

    batches = iter(loader)
    engine.backward(loss_in(call(engine, next(batches))))
    engine.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_copy", late)
        engine.save_checkpoint(folder)
        saved = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        call(engine, next(batches))
        begin.set()
        engine.finish_saving()
    changed = dict(engine.module.named_buffers())
    assert any((saved[name] != changed[name]).any() for name in saved), "the forward changes running statistics"
    engine.load_checkpoint(folder)
    for name, buffer in engine.module.named_buffers():
        np.testing.assert_array_equal(buffer, saved[name])


def test_buffers_are_copied_before_save_returns(tmp_path: Path) -> None:
    _check_saved_buffers(str(tmp_path / "right"))
    late = planted(
        "features.background_saves.saver:BackgroundSaver._write",
        "take(updated, changing)",
        "take(chain(updated, changing))",
    )
    with late, pytest.raises(AssertionError, match="Arrays are not equal"):
        _check_saved_buffers(str(tmp_path / "late"))


PLACES = (("weights", "main_weights", "moments", "gradients"), ("main_weights", "moments"))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "settings",
    [{"bf16": True}, {"zero_stage": 1, "bf16": True}, {"zero_stage": 2}, {"zero_stage": 3, "bf16": True}],
    ids=["zero0", "zero1", "zero2", "zero3"],
)
@pytest.mark.parametrize("own", [False, True], ids=["adam", "rmsprop"])
def test_state_comes_back_with_all_bits(settings: dict[str, Any], own: bool, tmp_path: Path) -> None:
    plain = run_ranks(2, _train_with_state_outside, settings, own, None)
    outside = run_ranks(2, _train_with_state_outside, settings, own, tmp_path)
    for (losses, weights, _), (losses_outside, weights_outside, freed) in zip(plain, outside, strict=True):
        assert losses == losses_outside and losses[0] != losses[-1]
        for name, tensor in weights.items():
            assert torch.equal(tensor, weights_outside[name])
        assert min(freed) > sum(tensor.numel() for tensor in weights.values())
        assert not list(tmp_path.iterdir())


def _train_with_state_outside(settings: dict[str, Any], own: bool, folder: Path | None) -> tuple[Any, Any, list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9) if own else None
    config = {"micro_batch_size": 2, "global_batch_size": 8, **settings}
    engine = megatron_core.initialize(model, config, optimizer).engine
    losses, freed = [], []
    data = torch.Generator().manual_seed(engine.world.rank)
    for number in range(8):
        x = torch.randn(2, 8, generator=data)
        loss = (engine(x).float() - x).square().mean()
        engine.backward(loss)
        losses.append(loss.item())
        if folder is not None and number:  # between backward and step, too
            freed.append(engine.offload(folder))
            with pytest.raises(MegatronError, match=r"are offloaded; call reload\(\)"):
                engine.step()
            with pytest.raises(MegatronError, match=r"weights.* are offloaded"):
                engine(x)
            engine.reload()
            engine.offload(folder, parts=PLACES[1])
            with torch.no_grad():
                assert torch.isfinite(engine(x)).all()
            engine.reload()
        engine.step()
    return losses, engine.full_state_dict(), freed


def _trained_again(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder / "other")
    engine.backward(engine(torch.ones(1, 8)).square().mean())
    engine.step()


def _with_other_weights(engine: Any, folder: Path) -> None:
    with engine.gathered(engine.module.weight, modify=True):
        nn.init.zeros_(engine.module.weight)


CHANGES: dict[str, Any] = {
    "a save into another folder, and a step": _trained_again,
    "gathered": _with_other_weights,
    "set_weights": lambda engine, _: engine.whole.set_weights(engine.module.weight, torch.zeros(8, 8)),
    "set_state": lambda engine, _: engine.whole.set_state(engine.module.weight, "exp_avg", torch.ones(8, 8)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_wait_for_the_copy_of_a_checkpoint(name: str, tmp_path: Path, monkeypatch: Any) -> None:  # C44
    begin, copy = Event(), snapshot._copy
    delays = [begin]

    def late(*pieces: object) -> None:
        if current_thread() is not main_thread() and delays:
            delays.pop().wait(60)
        copy(*pieces)

    engine = megatron_core.initialize(nn.Linear(8, 8), {"global_batch_size": 1, "async_save": True}).engine
    engine.backward(engine(torch.ones(1, 8)).square().mean())
    engine.step()
    weight = engine.module.weight
    saved = engine.whole.weights(weight), engine.whole.state(weight, "exp_avg")
    monkeypatch.setattr(snapshot, "_copy", late)
    engine.save_checkpoint(tmp_path / "checkpoint")
    Timer(0.2, begin.set).start()
    CHANGES[name](engine, tmp_path)
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert torch.equal(engine.whole.weights(weight), saved[0])
    assert torch.equal(engine.whole.state(weight, "exp_avg"), saved[1])
