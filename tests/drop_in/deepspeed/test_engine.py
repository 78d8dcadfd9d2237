"""Methods of ``DeepSpeedEngine``, its checkpoints, and ``zero.Init``."""

from __future__ import annotations

import copy
import random
from argparse import Namespace
from dataclasses import replace
from enum import Enum, Flag, auto
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.client_state import decode
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from megatron_core.errors import CheckpointError, ConfigError, LayoutError
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.drop_in.deepspeed import SHARDS
from tests.drop_in.deepspeed.compare import coalesce
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), nn.Linear(4, 1))


def _batch(number: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def _engine(model: nn.Module | None = None, **changes: Any) -> deepspeed.DeepSpeedEngine:
    given = {name: changes.pop(name) for name in ("optimizer", "lr_scheduler", "model_parameters") if name in changes}
    config = {**CONFIG, **changes}
    if "optimizer" in given:
        config.pop("optimizer")
    return deepspeed.initialize(model=model or _model(), config=config, **given)[0]


def _step(engine: deepspeed.DeepSpeedEngine, number: int) -> float:
    loss = engine(_batch(number).to(next(engine.module.parameters()).dtype)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def _weights(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]  # type: ignore[union-attr]


def _equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_accumulation_counts_and_scales() -> None:
    engine = _engine(gradient_accumulation_steps=2)
    loss = engine(_batch(0)).square().mean()
    assert float(engine.backward(loss)) == pytest.approx(loss.item() / 2)
    assert not engine.is_gradient_accumulation_boundary()
    before = _weights(engine)
    engine.step()
    assert _equal(before, _weights(engine))
    assert (engine.micro_steps, engine.global_steps, engine.get_global_grad_norm()) == (1, 0, None)
    assert engine.is_gradient_accumulation_boundary()
    _step(engine, 1)
    assert engine.was_step_applied()
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (2, 1, 4)
    assert not _equal(before, _weights(engine))
    assert engine.get_batch_info() == (4, 2, 2)
    assert engine.get_lr() == [0.01]
    assert engine.get_mom() == [(0.9, 0.999)]
    engine.set_train_batch_size(2)
    assert engine.gradient_accumulation_steps() == 1
    engine.set_train_micro_batch_size(3)
    assert engine.get_batch_info() == (3, 3, 1)
    with pytest.raises(ValueError, match="divisible"):
        engine.set_train_batch_size(4)
    assert engine.global_steps == 1 and engine.skipped_steps == 0
    engine.module.custom = 7
    assert engine.custom == 7


def test_boundaries_of_the_program_equal_counted_ones() -> None:
    counted = _engine(gradient_accumulation_steps=2)
    for number in range(4):
        _step(counted, number)
    told, unmanaged = _engine(gradient_accumulation_steps=2), _engine(managed_gradient_accumulation=False)
    without = _engine(gradient_accumulation_steps=1)
    for number in range(4):
        last = number % 2 == 1
        told.set_gradient_accumulation_boundary(last)
        told.backward(told(_batch(number)).square().mean())
        unmanaged.backward(unmanaged(_batch(number)).square().mean() / 2)
        if last:
            told.step()
            unmanaged.step()
            without.backward(without(_batch(number)).square().mean() / 2, scale_wrt_gas=False)
            without.step()
        else:
            with without.no_sync():
                without.backward(without(_batch(number)).square().mean() / 2)
                with pytest.raises(ConfigError, match="inside no_sync"):
                    without.step()
    for other in (told, unmanaged, without):
        torch.testing.assert_close(_weights(other), _weights(counted), rtol=1e-5, atol=1e-7)
        assert other.global_steps == 2
    assert unmanaged.global_samples == counted.global_samples == 8  # of all backwards since the last step


def test_scale_wrt_gas_false_keeps_the_loss() -> None:
    first, second = _engine(gradient_accumulation_steps=2), _engine(gradient_accumulation_steps=2)
    for number in range(2):
        _step(first, number)
        second.backward(second(_batch(number)).square().mean() / 2, scale_wrt_gas=False)
        second.step()
    torch.testing.assert_close(_weights(first), _weights(second), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW))
def test_optimizers_and_schedulers_of_the_program(kind: type[torch.optim.Optimizer]) -> None:
    model = _model()
    optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = _engine(model, optimizer=optimizer, lr_scheduler=scheduler)
    alone = _model()
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.1)
    halved = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    for number in range(3):
        _step(engine, number)
        alone(_batch(number)).square().mean().backward()
        plain.step()
        plain.zero_grad()
        halved.step()
    assert engine.get_lr() == pytest.approx([0.01 / 8])
    torch.testing.assert_close(_weights(engine), [p.detach() for p in alone.parameters()], rtol=1e-5, atol=1e-6)


def test_a_scheduler_that_the_program_takes_back_is_not_called() -> None:
    """As Lightning does, which calls it once an epoch."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = _engine(model, optimizer=optimizer, lr_scheduler=scheduler)
    assert engine.lr_scheduler is scheduler
    engine.lr_scheduler = None
    _step(engine, 0)
    assert engine.get_lr() == [0.01] and engine.lr_scheduler is None
    engine.lr_scheduler = scheduler
    _step(engine, 1)
    assert engine.get_lr() == [0.005]


def _repeats_steps_from_its_state(changes: dict[str, Any], with_class: bool) -> list[list[torch.Tensor]]:
    """Weights after four steps, and after the last two again from the state before them, in another engine."""
    engines = []
    for _ in range(2):
        model = _model()
        client = {"optimizer": torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9)} if with_class else {}
        engines.append(_engine(model, **client, **changes))
    first, second = engines
    for number in range(2):
        _step(first, number)
    weights, state = copy.deepcopy(first.module.state_dict()), first.optimizer.state_dict()
    for number in (2, 3):
        _step(first, number)
    _step(second, 7)  # a state to replace
    second.module.load_state_dict(weights)
    second.optimizer.load_state_dict(state)
    for number in (2, 3):
        _step(second, number)
    return [_weights(first), _weights(second)]


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("changes", ({}, {"bf16": {"enabled": True}}), ids=("float32", "bfloat16"))
def test_the_state_of_an_optimizer_is_restored_in_the_same_layout(
    ranks: int, stage: int, changes: dict[str, Any]
) -> None:
    changes = {"zero_optimization": {"stage": stage}, **changes}
    for with_class in (False, True):
        for first, second in run_ranks(ranks, _repeats_steps_from_its_state, changes, with_class):
            assert _equal(first, second)


def test_an_optimizer_keeps_its_state_if_the_weights_are_not_loaded() -> None:
    first, second = (_engine(_model(), bf16={"enabled": True}) for _ in range(2))
    for number in range(2):
        _step(first, number)
    before = second.optimizer.state_dict()["shards"]
    with pytest.raises(CheckpointError, match=r"call engine\.module\.load_state_dict before"):
        second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert _equal(before, second.optimizer.state_dict()["shards"])


def test_rates_that_the_program_sets_are_used() -> None:
    engine = _engine()
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    before = _weights(engine)
    _step(engine, 0)
    assert _equal(before, _weights(engine))


def test_one_cycle_changes_betas_of_the_update() -> None:
    cycle = {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2}
    still = _engine(scheduler={"type": "OneCycle", "params": {**cycle, "cycle_momentum": False}})
    moved = _engine(scheduler={"type": "OneCycle", "params": cycle})
    for number in range(3):
        _step(still, number)
        _step(moved, number)
    assert moved.get_mom() == [(pytest.approx(0.85), 0.99)]  # 3/4 of the cycle, between 0.8 and 0.9
    assert still.get_lr() == moved.get_lr()
    assert not torch.allclose(_weights(still)[0], _weights(moved)[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "name", "params"),
    (
        (FusedLamb, "Lamb", {"lr": 0.01, "max_coeff": 5.0}),
        (FusedLamb, "Lamb", {"lr": 0.01, "bias_correction": False}),
        (FusedLion, "Lion", {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.RMSprop, "RMSprop", {"lr": 0.01}),
        (torch.optim.Adagrad, "Adagrad", {"lr": 0.01}),
    ),
)
def test_json_and_class_give_equal_steps(kind: Any, name: str, params: dict[str, Any]) -> None:
    model = _model()
    from_class = _engine(model, optimizer=kind(model.parameters(), **params))
    config = {**CONFIG, "optimizer": {"type": name, "params": params}}
    from_json = deepspeed.initialize(model=_model(), config=config)[0]
    before = _weights(from_json)
    for number in range(2):
        _step(from_class, number)
        _step(from_json, number)
    assert _equal(_weights(from_class), _weights(from_json))
    assert not _equal(before, _weights(from_json))


def test_lion_without_an_engine() -> None:
    """Against algorithm 2 of Chen et al. (2023)."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(3, 4, generator=generator, dtype=torch.float64))
    optimizer = FusedLion([parameter, nn.Parameter(torch.ones(2))], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    weight = parameter.detach().clone()
    momentum = torch.zeros_like(weight)
    for _ in range(3):
        gradient = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        assert optimizer.step(lambda: 5) == 5
        weight -= 0.01 * (torch.sign(0.9 * momentum + 0.1 * gradient) + 0.1 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
        torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=1e-12)


def test_parts_of_offload_states(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(zero_optimization={"stage": 3})
    losses = [_step(engine, 0)]
    engine.offload_states()  # on a CPU: no effect
    engine.reload_states()
    losses.append(_step(engine, 1))
    plain = _engine()
    assert losses == [_step(plain, number) for number in (0, 1)]
    with pytest.raises(ValueError, match=r"device=.*nvme.* must be 'cpu'"):
        engine.offload_states(device=OffloadDeviceEnum.nvme)
    calls: list[Any] = []
    engine.core.world = replace(engine.core.world, device=torch.device("cuda"))
    monkeypatch.setattr(engine.core, "offload", lambda *, parts: calls.append(sorted(set(parts))))
    engine.offload_states()
    engine.optimizer.offload_states(include=[OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_grads])
    engine.offload_states(include=[OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.optim_states])
    every = ["gradients", "main_weights", "moments", "weights"]
    assert calls == [every, ["gradients", "main_weights"], ["moments", "weights"]]


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_coalesced_sums_are_equal(stage: int) -> None:
    ours = run_ranks(2, coalesce, stage)[0]
    theirs = ask(Task("tests.drop_in.deepspeed.compare:coalesce", (stage,), 2))
    assert ours == pytest.approx(theirs, rel=2e-5)


def test_coalesced_sums_are_refused_where_they_cannot_be() -> None:
    engine = _engine()
    with (
        pytest.raises(NotImplementedError, match="needs zero_optimization"),
        engine.coalesce_grad_reduction(),
    ):
        pass
    engine = _engine(zero_optimization={"stage": 1})
    with engine.coalesce_grad_reduction():
        with pytest.raises(ConfigError, match="nested"), engine.coalesce_grad_reduction():
            pass
        engine.backward(engine(_batch(0)).square().mean())
        with pytest.raises(ConfigError, match="no_sync"):
            engine.step()


def test_an_engine_without_optimizer_only_runs_forward() -> None:
    config = {name: value for name, value in CONFIG.items() if name != "optimizer"}
    engine, optimizer, _, _ = deepspeed.initialize(model=_model(), config=config)
    assert optimizer is None and engine(_batch(0)).shape == (2, 1)
    reference = deepspeed.initialize(model=_model().requires_grad_(False), config=config)[0]
    assert torch.equal(reference(_batch(0)), engine(_batch(0)))
    with pytest.raises(ConfigError, match="nothing to train"):
        deepspeed.initialize(model=_model().requires_grad_(False), config=CONFIG)
    assert deepspeed.initialize(model=_model(), config={**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": 0}}})[
        0
    ].get_lr() == [0.0]
    with pytest.raises(ConfigError, match="without an optimizer"):
        engine.backward(engine(_batch(0)).sum())


# Checkpoints.


def test_checkpoints_restore_everything(tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 8}}
    first = _engine(scheduler=scheduler)
    for number in range(2):
        _step(first, number)
    state = {"random": random.getstate(), "numpy": np.arange(3), "torch": torch.ones(2), 7: ("a", None, 1.5)}
    assert first.save_checkpoint(tmp_path, client_state=state)
    assert (tmp_path / "latest").read_text() == "global_step2"
    second = _engine(scheduler=scheduler)
    folder, found = second.load_checkpoint(tmp_path)
    assert folder == str(tmp_path / "global_step2") and found is not None
    assert found["random"] == random.getstate() or found["random"][1] == state["random"][1]  # type: ignore[index]
    assert found[7] == ("a", None, 1.5) and found["numpy"].tolist() == [0, 1, 2] and found["torch"].tolist() == [1, 1]
    assert (second.global_steps, second.global_samples, second.get_lr()) == (2, 4, first.get_lr())
    for number in range(2, 4):
        assert _step(first, number) == _step(second, number)
    assert _equal(_weights(first), _weights(second))
    first.save_checkpoint(tmp_path, tag="again", save_latest=False)
    first.save_checkpoint(tmp_path, tag="again", save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step2"
    third = _engine(scheduler=scheduler)
    third.load_checkpoint(tmp_path, tag="again", load_module_only=True)
    assert third.global_steps == 0
    assert _equal(_weights(first), _weights(third))


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"tag": "absent"}, "no such checkpoint"),
        ({"tag": "a/b"}, "must be the name of a folder"),
        ({"tag": "theirs"}, "theirs.mp_rank_00_model_states.pt cannot be read"),
        ({"tag": "theirs", "load_module_strict": False}, "theirs was written by DeepSpeed"),
    ),
)
def test_bad_checkpoints_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").write_bytes(b"")
    engine = _engine()
    assert engine.load_checkpoint(tmp_path) == (None, None)
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(tmp_path, **arguments)


def test_a_client_state_without_a_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"client_state\['model'\] is a Linear"):
        _engine().save_checkpoint(tmp_path, client_state={"model": nn.Linear(1, 1)})


def test_arguments_of_a_program_are_stored_without_pickle(tmp_path: Path) -> None:
    """Megatron-DeepSpeed stores its parsed flags."""
    arguments = Namespace(
        kind=OffloadDeviceEnum.cpu, dtype=torch.bfloat16, lr=0.5, sizes=(1, 2), inner=Namespace(a=None)
    )
    engine = _engine()
    engine.save_checkpoint(tmp_path, client_state={"args": arguments})
    _, state = engine.load_checkpoint(tmp_path)
    assert state is not None and state["args"] == arguments
    assert type(state["args"].kind) is OffloadDeviceEnum and state["args"].dtype is torch.bfloat16


class Phases:
    """An Enum may be defined in a class."""

    class Kind(Flag):
        TRAIN = auto()
        TEST = auto()


def test_members_of_an_enum_that_could_not_be_read_back_are_refused(tmp_path: Path) -> None:
    class Local(Enum):
        A = 1

    engine = _engine()
    engine.save_checkpoint(tmp_path, client_state={"kind": Phases.Kind.TEST})
    _, state = engine.load_checkpoint(tmp_path)
    assert state is not None and state["kind"] is Phases.Kind.TEST
    for member in (Local.A, Phases.Kind.TRAIN | Phases.Kind.TEST, Phases.Kind(0)):
        with pytest.raises(CheckpointError, match=r"client_state\['kind'\] is a (Local|Kind)"):
            engine.save_checkpoint(tmp_path, client_state={"kind": member})


@pytest.mark.parametrize("name", ("not_imported.Kind", "os.system"))
def test_a_file_does_not_choose_modules_to_import(name: str) -> None:
    module, kind = name.split(".")
    with pytest.raises(CheckpointError, match=f"{name}, which is not an Enum .* import it before"):
        decode({"__kind__": "enum", "module": module, "class": kind, "member": "A"})


@pytest.mark.parametrize(
    "entry",
    (
        {"__kind__": "dtype", "text": "load"},
        {"__kind__": "namespace", "items": [1]},
    ),
)
def test_a_file_does_not_choose_functions(entry: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"damaged entry of kind '{entry['__kind__']}'"):
        decode(entry)


def test_weights_are_written_for_torch_and_safetensors(tmp_path: Path) -> None:
    engine = _engine()
    assert engine.save_16bit_model(tmp_path)
    found = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert found.keys() == engine.module_state_dict().keys()
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 20_000
    assert engine.save_16bit_model(tmp_path, "model.safetensors")
    assert (tmp_path / "model.safetensors").is_file()


# Several ranks and ZeRO 3.


def _zero3(folder: str) -> dict[str, Any]:
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        torch.manual_seed(dist.get_rank())
        model = _model_without_seed()
    constructed = [p.ds_status for p in model.parameters()]  # type: ignore[attr-defined]
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=1):
        if dist.get_rank() == 1:
            nn.init.constant_(model[2].weight, 0.25)
    broadcast = model[2].weight.detach().clone()
    stage = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 4}
    engine = _engine(model, zero_optimization=stage, gradient_clipping=0.1)
    status = model[0][0].weight.ds_status
    persists = [parameter.ds_persist for parameter in model.parameters()]  # type: ignore[attr-defined]
    with deepspeed.zero.GatheredParameters(model[0][0].weight, modifier_rank=0):
        inside = model[0][0].weight.ds_status
        if dist.get_rank() == 0:
            nn.init.ones_(model[0][0].weight)
    after = safe_get_full_fp32_param(model[0][0].weight)
    loss = engine(_batch(0)).square().mean()
    engine.backward(loss)
    gradient = safe_get_full_grad(model[2].bias)
    engine.step()
    bias = model[0][0].bias.detach().clone()  # whole on every rank: it has 4 elements
    assert torch.equal(bias, safe_get_full_fp32_param(model[0][0].bias))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"0\.0\.weight of shape \(4, 4\) .* is split over 2 ranks"):
        model[0][0].weight.sum()
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    state = engine._zero3_consolidated_16bit_state_dict()
    return {
        "constructed": constructed,
        "broadcast": broadcast,
        "persists": persists,
        "status": (status, inside, model[0][0].weight.ds_status),
        "after": after,
        "gradient": gradient,
        "norm": engine.get_global_grad_norm(),
        "state": None if state is None else {name: tensor.clone() for name, tensor in state.items()},
    }


def _model_without_seed() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), nn.Linear(4, 1))


def test_zero_3_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, _zero3, str(tmp_path))
    assert set(first["constructed"]) == {ZeroParamStatus.AVAILABLE}
    for found in (first, second):
        assert torch.equal(found["broadcast"], torch.full((1, 4), 0.25))
    assert first["persists"] == [False, True, False, True, True, True]
    available, absent = ZeroParamStatus.AVAILABLE, ZeroParamStatus.NOT_AVAILABLE
    assert first["status"] == second["status"] == (absent, available, absent)
    assert torch.equal(first["after"], torch.ones(4, 4)) and torch.equal(second["after"], torch.ones(4, 4))
    assert torch.equal(first["gradient"], second["gradient"]) and first["gradient"].abs().sum() > 0
    assert first["norm"] == second["norm"]
    assert second["state"] is None and first["state"].keys() == _model().state_dict().keys()
    # One process continues with the checkpoint of two ranks.
    engine = _engine()
    engine.load_checkpoint(tmp_path)
    assert _equal(list(engine.module_state_dict().values()), list(first["state"].values()))
    assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True).keys() == first["state"].keys()


def _different() -> None:
    _engine(nn.Linear(4, 1 + dist.get_rank()))


def _tags(folder: str) -> None:
    _engine().save_checkpoint(folder, tag=f"rank{dist.get_rank()}")


def test_ranks_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="the model differs between ranks"):
        run_ranks(2, _different)
    with pytest.raises(RankFailure, match="tag differs between ranks: 'rank0', 'rank1'"):
        run_ranks(2, _tags, str(tmp_path))


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"config": None}, "no DeepSpeed configuration"),
        ({"config": CONFIG, "model": None}, "model=None must be a torch.nn.Module"),
        ({"config": {**CONFIG, "stage": 1}}, "stage is not a key of DeepSpeed"),
        ({"config": {**CONFIG, "scheduler": {"type": "Absent"}}}, "'Absent' is not a scheduler"),
        ({"config": {**CONFIG, "scheduler": {"type": "WarmupLR", "params": {"warm": 1}}}}, "warm"),
        ({"config": {**CONFIG, "optimizer": {"type": "Absent"}}}, "'Absent' is not an optimizer"),
        ({"config": {**CONFIG, "optimizer": {"type": "RMSprop", "params": {"rate": 1}}}}, "'?rate'?=1 is not a param"),
        ({"config": CONFIG, "optimizer": 3}, "optimizer=3 must be a torch optimizer"),
        ({"config": CONFIG, "optimizer": torch.optim.SGD(_model().parameters(), lr=0.1)}, "do not belong to the model"),
        ({"config": CONFIG | {"sequence_parallel_size": 2}, "mesh_param": (1, 1)}, "contradicts mesh_param="),
        ({"config": CONFIG, "training_data": 3}, "must be a torch Dataset"),
    ),
)
def test_bad_input_is_one_sentence(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, LayoutError, ValueError), match=message) as caught:
        deepspeed.initialize(**{"model": _model(), **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ("inference.v2", "sequence.auto_sp"))
def test_absent_parts_say_what_to_use(name: str) -> None:
    with pytest.raises(ImportError, match=r"is not available in megatron_core.drop_in: (use|set) "):
        __import__(f"deepspeed.{name}")


@pytest.mark.parametrize(
    ("call", "message"),
    (
        (lambda engine: engine.train_batch(iter([])), "needs a PipelineModule"),
        (lambda engine: engine.compile(schedule=[1]), "schedule of DeepCompile"),
        (lambda engine: engine.step(), r"step\(\) without backward"),
        (lambda engine: engine.backward(torch.ones(2)), "must be a tensor with one element"),
        (lambda engine: engine.optimizer.load_state_dict({}), "engine.save_checkpoint can be loaded in every layout"),
    ),
)
def test_calls_that_cannot_work_are_one_sentence(call: Any, message: str) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=message):
        call(_engine())


def test_zero_grad_discards_the_open_step_without_shards() -> None:
    plain, other = (_engine(gradient_accumulation_steps=2, zero_optimization={"stage": 1}) for _ in range(2))
    for number in range(3):
        if number:
            plain.backward(plain(_batch(number)).square().mean())
        other.backward(other(_batch(number)).square().mean())
        if not number:
            other.zero_grad()
            continue
        plain.step()
        other.step()
    assert _equal(_weights(plain), _weights(other)) and plain.global_steps == other.global_steps == 1


def test_loss_backward_and_scale_equal_the_engines_backward() -> None:
    for stage in (0, 2, 3):
        direct, reference = run_ranks(2, _train_directly, stage)[0]
        assert _equal(direct, reference)
    engine = _engine(fp16={"enabled": True, "initial_scale_power": 10, "auto_cast": True})
    with pytest.raises(ConfigError, match=r"without the loss scale 1024 .*engine\.scale\(loss\)\.backward\(\)"):
        engine(_batch(0)).square().mean().backward()
    engine.scale(engine(_batch(0)).square().mean()).backward()
    engine.step()
    assert engine.was_step_applied()


def _train_directly(stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    found = []
    for is_direct in (True, False):
        engine = _engine(zero_optimization={"stage": stage, **SHARDS}, gradient_accumulation_steps=2)
        for number in range(4):
            loss = engine(_batch(number)).square().mean()
            if is_direct:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
        assert engine.global_steps == 2
        found.append(_weights(engine))
    return found[0], found[1]


def test_adam_without_bias_correction() -> None:
    model = _model()
    optimizer = FusedAdam(model.parameters(), lr=0.01, bias_correction=False)
    with pytest.raises(ConfigError, match=r"FusedAdam\(bias_correction=False\)\.step\(\)"):
        optimizer.step()
    engine = _engine(model, optimizer=optimizer)
    params = {"lr": 0.01, "bias_correction": False}
    other = deepspeed.initialize(model=_model(), config={**CONFIG, "optimizer": {"type": "Adam", "params": params}})[0]
    for number in range(3):
        assert _step(engine, number) == _step(other, number)
    assert _equal(_weights(engine), _weights(other))
    assert not _equal(_weights(engine), _weights(_trained_plainly()))


def _trained_plainly() -> deepspeed.DeepSpeedEngine:
    engine = _engine()
    for number in range(3):
        _step(engine, number)
    return engine


def _other(model: nn.Module) -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.AdamW(model.parameters(), lr=0.1), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": lambda parameters: None}, "optimizer=function <lambda> returned None, not a torch optimizer"),
        ({"optimizer": "adam"}, "optimizer='adam' must be a torch optimizer, or a function"),
        ({"lr_scheduler": lambda optimizer: None}, "lr_scheduler=function <lambda> returned None, which has no step()"),
        ({"lr_scheduler": _other(_model())}, "changes the learning rates of another optimizer (AdamW)"),
        ({"model_parameters": [{"lr": 0.1}]}, "group 0 of model_parameters has no 'params'"),
        ({"model": nn.LazyLinear(3)}, "weight, bias have no shape before the first forward"),
        ({"model": nn.Linear}, "model=type Linear must be a torch"),
    ],
)
def test_wrong_arguments_are_one_sentence(arguments: dict[str, Any], message: str) -> None:
    config = {**CONFIG}
    if "optimizer" in arguments:
        config.pop("optimizer")
    with pytest.raises(ConfigError) as error:
        deepspeed.initialize(**{"model": _model(), "config": config, **arguments})
    assert message in str(error.value)


@pytest.mark.parametrize("params", [{"betas": "x"}, {"rho": -1.0}])
def test_wrong_parameters_of_a_class_of_torch_are_one_sentence(params: dict[str, Any]) -> None:
    name = "Adadelta" if "rho" in params else "NAdam"
    config = {**CONFIG, "optimizer": {"type": name, "params": params}}
    with pytest.raises(ConfigError, match=f"of {name}: .*correct the parameters"):
        deepspeed.initialize(model=_model(), config=config)


def test_loss_scale_and_steps_of_the_optimizer() -> None:
    engine = _engine(fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "auto_cast": True})
    scale = engine.optimizer.loss_scale_config
    assert (scale.dynamic_loss_scale, scale.cur_scale, scale.scale_window, scale.cur_iter) == (True, 256.0, 2, 0)
    weight = engine.module[0][0].weight
    assert weight not in dict(engine.optimizer.state)
    for number in range(3):  # the first good step is not counted, as in DeepSpeed
        _step(engine, number)
    scale = engine.optimizer.loss_scale_config
    assert (scale.cur_scale, scale.cur_iter) == (512.0, 3)
    scaler = engine.optimizer.loss_scaler
    assert (scaler.loss_scale, scaler.cur_scale, scaler.dynamic) == (512.0, 512.0, True)
    assert engine.optimizer.dynamic_loss_scale
    assert engine.optimizer.state[weight]["step"] == 3
    with pytest.raises(ConfigError, match=r"safe_get_full_optimizer_state\(parameter, 'exp_avg'\)"):
        engine.optimizer.state[weight]["exp_avg"]


def test_warm_up_keeps_a_learning_rate_in_a_tensor() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_num_steps=4, warmup_type="linear")
    assert float(rate) == 0.0
    scheduler.step(2)
    assert optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.05)


def test_tags_that_differ_between_ranks(tmp_path: Path) -> None:
    for mode, expected in (("FAIL", None), ("WARN", "tag-0"), ("ignore", "tag-0")):
        assert run_ranks(2, _save_with_own_tag, mode, str(tmp_path / mode)) == [expected, expected]
    with pytest.raises(deepspeed.DeepSpeedConfigError, match=r"tag_validation='FOO' must be one of IGNORE, WARN, FAIL"):
        _engine(checkpoint={"tag_validation": "foo"})


def _save_with_own_tag(mode: str, folder: str) -> str | None:
    engine = _engine(checkpoint={"tag_validation": mode})
    _step(engine, 0)
    try:
        engine.save_checkpoint(folder, tag=f"tag-{dist.get_rank()}")
    except AssertionError as error:
        assert isinstance(error, CheckpointError) and "tag differs between ranks: 'tag-0', 'tag-1'" in str(error)
        return None
    return Path(folder, "latest").read_text()


@pytest.mark.parametrize(
    ("fault", "message"),
    (
        ("stage", "the settings differ between ranks: rank 0 has zero_stage=0, and rank 1 has 2; give the same config"),
        ("key", "foo is not a key of DeepSpeed"),
        ("file", "no such file; give the path of a JSON file"),
        ("optimizer", "2 of its 2 parameters do not belong to the model"),
    ),
)
def test_a_fault_of_one_rank_is_an_error_on_all(fault: str, message: str) -> None:
    for text in run_ranks(2, _fault_of_rank_1, fault):
        assert message in text


def _fault_of_rank_1(fault: str) -> str:
    config: Any = dict(CONFIG)
    given: dict[str, Any] = {}
    if dist.get_rank() == 1:
        if fault == "stage":
            config["zero_optimization"] = {"stage": 2}
        elif fault == "key":
            config["foo"] = 1
        elif fault == "file":
            config = "absent.json"
        else:
            given["optimizer"] = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=0.01)
    model = _model()
    if fault == "optimizer":
        del config["optimizer"]
        given.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=0.01))
    try:
        deepspeed.initialize(model=model, config=config, **given)
    except (ConfigError, LayoutError) as error:
        return str(error)
    return ""
