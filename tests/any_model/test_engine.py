"""Optimizers, schedules, checkpoints, precision and errors of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import megatron_core
from megatron_core.any_model import Engine
from megatron_core.any_model.module import find_units
from megatron_core.errors import CheckpointError, ConfigError, LayoutError, MegatronError
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.models import (
    BATCH,
    COMMON,
    Tangled,
    call,
    loss_in,
    model_of,
    samples_of,
    train_with_engine,
    weights_of,
)

PLAIN = {**COMMON, "global_batch_size": BATCH}


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _points(count: int = 64) -> list[torch.Tensor]:
    return [torch.randn(4, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(count)]


def _run(engine: Engine, batches: Any, steps: int) -> list[float]:
    found: list[float] = []
    for batch in batches:
        engine.backward(engine(batch).square().mean())
        report = engine.step()
        if report is not None:
            found.append(report.loss)
        if len(found) == steps:
            break
    return found


# Optimizers and schedules.


def test_optimizer_and_scheduler_of_torch_continue_on_shards() -> None:
    found = run_ranks(2, _with_client_optimizer)[0]
    model = _mlp().double()
    optimizer = torch.optim.AdamW(_two_groups(model), lr=1e-2, betas=(0.8, 0.9), eps=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    points, expected = _points(), []
    for step in range(4):
        loss = model(torch.stack(points[step * BATCH : (step + 1) * BATCH])).square().mean()
        loss.backward()
        expected.append((loss.item(), optimizer.param_groups[1]["lr"]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": list(model[0].parameters()), "weight_decay": 0.3},
        {"params": list(model[2].parameters()), "lr": 3e-2},
    ]


def _with_client_optimizer() -> list[tuple[float, float]]:
    model = _mlp()
    optimizer = torch.optim.AdamW(_two_groups(model), lr=1e-2, betas=(0.8, 0.9), eps=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    config = {**PLAIN, "micro_batch_size": 2, "zero_stage": 2}
    engine, own, loader, kept = megatron_core.initialize(model, config, optimizer, _points(), scheduler, shuffle=False)
    assert kept is scheduler
    found = []
    for batch in loader:
        rate = own.param_groups[1]["lr"]
        engine.backward(engine(batch).square().mean())
        report = engine.step()
        if report is not None:
            found.append((report.loss, rate))
    return found[:4]


def test_configured_schedule_and_group_rates() -> None:
    config = {**PLAIN, "lr_warmup_iters": 2, "train_iters": 6, "lr_decay_style": "linear", "min_lr": 0.0, "lr": 0.1}
    model = _mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    engine, optimizer, loader, _ = megatron_core.initialize(
        model, config, model_parameters=groups, training_data=_points()
    )
    rates = []
    for batch in loader:
        engine.backward(engine(batch).square().mean())
        if engine.step() is not None:
            rates.append([group["lr"] for group in optimizer.param_groups])
    expected = [0.05, 0.1, 0.075, 0.05, 0.025, 0.0]
    np.testing.assert_allclose(rates[:6], [[x / 10, x] for x in expected], atol=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon"])
def test_other_optimizers_do_not_depend_on_ranks(optimizer: str) -> None:
    alone = train_with_engine("tangled", optimizer=optimizer)
    for result in run_ranks(2, _train_tangled, {"optimizer": optimizer, "zero_stage": 2}):
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-9)


def _train_tangled(settings: dict[str, Any]) -> dict[str, Any]:
    return train_with_engine("tangled", **settings)


def test_number_of_terms_weights_micro_batches() -> None:
    found = run_ranks(2, _weighted)[0]
    model = _mlp().double()
    points = _points(BATCH)
    counts = [1 + n % 3 for n in range(BATCH)]
    total = sum(model(point).square().sum() * count for point, count in zip(points, counts, strict=True))
    (total / sum(counts)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    np.testing.assert_allclose(found, [(total / sum(counts)).item(), norm.item()], rtol=1e-10)


def _weighted() -> list[float]:
    engine, _, loader, _ = megatron_core.initialize(
        _mlp(), {**PLAIN, "zero_stage": 2}, training_data=list(enumerate(_points(BATCH))), shuffle=False
    )
    for number, point in loader:
        count = 1 + int(number) % 3
        engine.backward(engine(point).square().sum() * count, num_terms=count)
        report = engine.step()
    return [report.loss, report.grad_norm]


def test_several_forwards_before_a_backward() -> None:
    for stage in (0, 2, 3):
        found = run_ranks(2, _two_views, stage)[0]
        np.testing.assert_allclose(found, _two_views_alone(), rtol=1e-10)


def _two_views(stage: int) -> list[float]:
    engine, _, loader, _ = megatron_core.initialize(
        _mlp(), {**PLAIN, "zero_stage": stage}, training_data=_points(2 * BATCH), shuffle=False
    )
    found = []
    for point in loader:
        engine.eval()
        with torch.no_grad():
            target = engine(-point)
        engine.train()
        first, second = engine(point), engine(2 * point)
        engine.backward((first - second + target).square().mean())
        if (report := engine.step()) is not None:
            found += [report.loss, report.grad_norm]
    return found


def _two_views_alone() -> list[float]:
    model, points, found = _mlp().double(), _points(2 * BATCH), []
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1]}]
    groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=COMMON["lr"], weight_decay=COMMON["weight_decay"], eps=COMMON["adam_eps"])
    for step in range(2):
        x = torch.stack(points[step * BATCH : (step + 1) * BATCH])
        with torch.no_grad():
            target = model(-x)
        loss = (model(x) - model(2 * x) + target).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), COMMON["clip_grad"])
        found += [loss.item(), norm.item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


# Checkpoints.


def _layouts(settings: dict[str, Any], folder: str, steps: int, *, resume: bool) -> dict[str, Any]:
    engine, _, loader, _ = megatron_core.initialize(
        model_of("convolutions"), {**PLAIN, **settings}, training_data=samples_of("convolutions", 64)
    )
    state = engine.load_checkpoint(folder) if resume else {}
    losses = []
    for batch in loader:
        engine.backward(loss_in(call(engine, batch)))
        if (report := engine.step()) is not None:
            losses.append(report.loss)
        if engine.state.iteration == steps:
            break
    if not resume:
        engine.save_checkpoint(folder, {"note": [1, "two"]})
    weights = weights_of(engine.full_state_dict(), engine.module)
    buffers = {name: b.numpy().copy() for name, b in engine.module.named_buffers() if "mean" in name}
    return {"losses": losses, "state": state, "weights": weights, "buffers": buffers}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("ranks", "settings"), [(1, {}), (2, {"zero_stage": 3}), (4, {"zero_stage": 1})])
def test_resume_in_another_layout(ranks: int, settings: dict[str, Any], tmp_path: Path) -> None:
    straight = _layouts({}, str(tmp_path / "other"), 6, resume=False)
    run_ranks(2, _layouts_of_rank, {"zero_stage": 2}, str(tmp_path / "run"), 3, False)
    if ranks == 1:
        (found,) = [_layouts(settings, str(tmp_path / "run"), 6, resume=True)]
    else:
        found = run_ranks(ranks, _layouts_of_rank, settings, str(tmp_path / "run"), 6, True)[0]
    assert found["state"] == {"note": [1, "two"]}
    np.testing.assert_allclose(found["losses"], straight["losses"][3:], rtol=1e-9)
    for name, weights in straight["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weights, rtol=1e-7, atol=1e-10)


def _layouts_of_rank(settings: dict[str, Any], folder: str, steps: int, resume: bool) -> dict[str, Any]:
    return _layouts(settings, folder, steps, resume=resume)


def test_resume_is_exact_to_the_bit(tmp_path: Path) -> None:
    straight = _layouts({}, str(tmp_path / "a"), 4, resume=False)
    _layouts({}, str(tmp_path / "b"), 2, resume=False)
    resumed = _layouts({}, str(tmp_path / "b"), 4, resume=True)
    assert resumed["losses"] == straight["losses"][2:]
    for name, buffer in straight["buffers"].items():
        assert (resumed["buffers"][name] == buffer).all(), name


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    engine, _, loader, _ = megatron_core.initialize(_mlp(), PLAIN, training_data=_points())
    _run(engine, loader, 1)
    engine.save_checkpoint(tmp_path)
    other = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
    with pytest.raises(CheckpointError, match=r"0\.weight has the shape \[8, 4\]; this run needs \[9, 4\]"):
        megatron_core.initialize(other, PLAIN).engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        engine.load_checkpoint(tmp_path / "nothing")


def test_gradients_are_not_saved(tmp_path: Path) -> None:
    engine, _, loader, _ = megatron_core.initialize(_mlp(), PLAIN, training_data=_points())
    engine.backward(engine(next(iter(loader))).sum())
    with pytest.raises(CheckpointError, match="call it after the step"):
        engine.save_checkpoint(tmp_path)


# Precision, memory and initialisation.


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_and_keeps_float32_weights(precision: str) -> None:
    config = {"micro_batch_size": 4, "global_batch_size": 8, "lr": 1e-2, precision: True, "zero_stage": 1}
    config["initial_loss_scale"] = 1024.0
    losses, bits = run_ranks(2, _half, config)[0]
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert bits > 0, "no main weight has more bits than bfloat16 or float16"


def _half(config: dict[str, Any]) -> tuple[list[float], int]:
    engine, _, loader, _ = megatron_core.initialize(_mlp(), config, training_data=_points(128))
    losses = _run(engine, loader, 16)
    dtype = next(engine.module.parameters()).dtype
    main = torch.cat([tensors["main"] for _, tensors in engine._sharded.tensors()])
    assert main.dtype == torch.float32
    return losses, int((main != main.to(dtype)).sum())


def test_meta_device_gives_the_same_weights_in_every_layout() -> None:
    whole = _meta(0)
    for stage in (1, 3):
        for found in run_ranks(2, _meta, stage):
            for name, weights in whole.items():
                assert (found[name] == weights).all(), name
    assert abs(whole["0.weight"]).max() > 0.1
    assert abs(whole["0.weight"]).max() <= 0.5, "nn.Linear draws from +-1/sqrt(inputs)"


def _meta(stage: int) -> dict[str, np.ndarray]:
    with torch.device("meta"):
        model = _mlp()
    engine = megatron_core.initialize(model, {**PLAIN, "zero_stage": stage}).engine
    return weights_of(engine.full_state_dict(), engine.module)


class _WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4, bias=False)])
        self.again = nn.Linear(8, 4, bias=False)
        self.again.weight = self.layers[1].weight
        self.register_buffer("table", torch.arange(3.0))


def test_meta_init_leaves_buffers_and_ties() -> None:
    with megatron_core.meta_init():
        model = _WithTable()
    assert all(parameter.is_meta for parameter in model.parameters()) and len(list(model.parameters())) == 3
    assert nn.Linear(1, 1).weight.device.type == "cpu"
    megatron_core.initialize(model, PLAIN)
    assert model.again.weight is model.layers[1].weight and model.again.weight.abs().sum() > 0
    assert model.table.tolist() == [0.0, 1.0, 2.0]
    with torch.device("meta"):
        model = _WithTable()
    with pytest.raises(ConfigError, match=r"table is a buffer on the meta device.*megatron_core\.meta_init\(\)"):
        megatron_core.initialize(model, PLAIN)


def test_ranks_begin_with_the_weights_of_rank_0() -> None:
    first, second = run_ranks(2, _drawn_by_rank)
    assert all((first[name] == second[name]).all() for name in first)


def _drawn_by_rank() -> dict[str, np.ndarray]:
    torch.manual_seed(torch.distributed.get_rank())
    engine = megatron_core.initialize(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), PLAIN).engine
    return weights_of(engine.full_state_dict(), engine.module)


def test_memory_of_sharded_states() -> None:
    plain, whole = (run_ranks(2, _resident, stage)[0] for stage in (3, 0))
    assert plain["weights"] < 0.7 * whole["weights"]
    assert plain["gradients"] < 0.7 * whole["gradients"]


def _resident(stage: int) -> dict[str, int]:
    return megatron_core.initialize(
        model_of("llama"), {**PLAIN, "zero_stage": stage}
    ).engine.data_parallel.resident_bytes()


def test_units() -> None:
    llama = model_of("llama")
    assert [type(unit[0]).__name__ for unit in find_units(llama)] == ["LlamaDecoderLayer"] * 3
    assert len(find_units(Tangled())) == 3
    assert [type(unit[0]).__name__ for unit in find_units(llama, ["LlamaMLP"])] == ["LlamaMLP"] * 3
    assert len(find_units(llama, [nn.Embedding, "LlamaAttention"])) == 4
    with pytest.raises(ConfigError, match=r"unit_classes=\['Nothing'\]: the model has no such modules; its classes"):
        find_units(llama, ["Nothing"])
    listed = nn.ModuleDict({"head": nn.Linear(2, 2), "table": nn.ParameterList([torch.ones(2, 2)])})
    assert find_units(listed) == [[listed["head"]]]  # the other is read without a call


# Bad input.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_stag": 1}, "'zero_stag' is not a setting; perhaps you meant zero_stage"),
        ({"zebra": 1}, "'zebra' is not a setting; docs/any_model.md"),
        ({"zero_stage": "many"}, "zero_stage='many' does not fit; legal: 0, 1, 2, 3 or null"),
        ({"num_layers": 3}, "num_layers has no effect on a model of your own"),
        ({"save": "x"}, "save has no effect on a model of your own"),
        ({"log_interval": 3, "end_weight_decay": 0.5}, "end_weight_decay, log_interval have no effect"),
        ({"tensor_model_parallel_size": 2}, "world_size=1 is not a multiple of 2"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"global_batch_size": 3, "micro_batch_size": 2}, "global_batch_size=3"),
        ({"bf16": True, "fp16": True}, "fp16"),
        (3, "config=3 must be a dict"),
    ],
)
def test_bad_settings(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron_core.initialize(_mlp(), config)


def test_bad_optimizers() -> None:
    model = _mlp()
    with pytest.raises(ConfigError, match=r"do not belong to the model"):
        megatron_core.initialize(model, PLAIN, torch.optim.AdamW(_mlp().parameters()))
    with pytest.raises(ConfigError, match=r"2\.weight and 1 more trained parameters are in no group"):
        megatron_core.initialize(model, PLAIN, torch.optim.AdamW(model[0].parameters()))
    with pytest.raises(ConfigError, match="nothing to train"):
        megatron_core.initialize(_mlp().requires_grad_(False), PLAIN)


def test_bad_use() -> None:
    engine, _, loader, _ = megatron_core.initialize(_mlp(), PLAIN, training_data=_points())
    batch = next(iter(loader))
    with pytest.raises(ConfigError, match=r"call engine\.backward"):
        engine.step()
    with pytest.raises(ConfigError, match=r"loss=tensor of shape \(1, 4\) must be a tensor with one element"):
        engine.backward(batch)
    with pytest.raises(MegatronError, match="iteration 1: loss=nan"):
        for _ in range(BATCH):
            engine.backward(engine(batch).sum() * torch.nan)
            engine.step()
    with pytest.raises(ConfigError, match="has 3 samples, fewer than global_batch_size=8"):
        engine.make_loader(_points(3))


@pytest.mark.parametrize("direct", [False, True])
def test_losses_of_two_backwards_are_added(direct: bool) -> None:
    reports = []
    for overlap in (False, True):
        settings = {**PLAIN, "global_batch_size": 1, "overlap_grad_reduce": overlap}
        engine, _, loader, _ = megatron_core.initialize(_mlp(), settings, training_data=_points(), shuffle=False)
        for batch in list(loader)[:2]:
            for _ in range(2):
                loss = engine(batch).square().sum()
                loss.backward() if direct else engine.backward(loss)
            reports.append(engine.step())
    assert reports[:2] == reports[2:]
    once = megatron_core.initialize(_mlp(), {**PLAIN, "global_batch_size": 1}).engine
    once.backward(2 * once(_points()[0][None]).square().sum())
    expected = once.step()
    assert reports[0].grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    if not direct:  # the loss of the program is unknown
        assert reports[0].loss == pytest.approx(expected.loss, rel=1e-12)


def test_models_that_differ_between_ranks() -> None:
    with pytest.raises(RankFailure, match=r"rank 0 has 0\.weight \(4, 4\) .*, and rank 1 has 0\.weight \(5, 4\)"):
        run_ranks(2, _differs)
    assert issubclass(LayoutError, MegatronError)


def _differs() -> None:
    rank = torch.distributed.get_rank()
    megatron_core.initialize(nn.Sequential(nn.Linear(4, 4 + rank)), PLAIN)
