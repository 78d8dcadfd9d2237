"""Calls of programs besides ``engine(...)``, ``backward`` and ``step``, compared with torch and DeepSpeed."""

from __future__ import annotations

import copy
import io
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.translation import read_json
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed import SHARDS
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask
from tests.drop_in.deepspeed.traces import sections

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
}


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), nn.Linear(4, 1))


def _batch(number: int, rank: int | None = None) -> torch.Tensor:
    rank = rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def _engine(model: nn.Module | None = None, optimizer: Any = None, **changes: Any) -> deepspeed.DeepSpeedEngine:
    config = {**CONFIG, **changes}
    if optimizer is not None:
        del config["optimizer"]
    return deepspeed.initialize(model=model or _model(), optimizer=optimizer, config=config)[0]


def _step(engine: deepspeed.DeepSpeedEngine, number: int) -> None:
    engine.backward(engine(_batch(number)).square().mean())
    engine.step()


def _weights(engine: deepspeed.DeepSpeedEngine) -> list[torch.Tensor]:
    return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]  # type: ignore[union-attr]


def _assert_close(found: list[torch.Tensor], expected: Any, tolerance: float = 1e-5) -> None:
    for tensor, other in zip(found, expected, strict=True):
        torch.testing.assert_close(tensor, other.detach(), rtol=tolerance, atol=tolerance)


# Losses of modules, and of several engines.


def _train_together(stage: int) -> list[list[torch.Tensor]]:
    engines = [
        _engine(_model(seed), zero_optimization={"stage": stage, **SHARDS}, gradient_accumulation_steps=2)
        for seed in (0, 1)
    ]
    for number in range(4):
        losses = [engine.module(_batch(number)).square().mean() for engine in engines]
        (losses[0] + losses[1] / 2).backward()
        for engine in engines:
            engine._backward_epilogue()
            engine.step()
    assert all(engine.global_steps == 2 for engine in engines)
    return [_weights(engine) for engine in engines]


def _train_together_with_torch() -> list[list[nn.Parameter]]:
    models = [_model(seed) for seed in (0, 1)]
    parameters = [list(model.parameters()) for model in models]
    optimizer = torch.optim.AdamW([*parameters[0], *parameters[1]], lr=0.01, weight_decay=0.0)
    for step in range(2):
        for number in (2 * step, 2 * step + 1):
            for rank in range(2):
                losses = [model(_batch(number, rank)).square().mean() for model in models]
                ((losses[0] + losses[1] / 2) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters


@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_a_loss_of_two_modules_trains_both_engines(stage: int) -> None:
    for found, expected in zip(run_ranks(2, _train_together, stage)[1], _train_together_with_torch(), strict=True):
        _assert_close(found, expected)


# A generator and a discriminator: a backward of the first reaches the second.

DISCARDS: dict[str, Any] = {
    "engine": lambda engine: engine.zero_grad(),
    "module": lambda engine: engine.module.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
}


def _generator() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 4)


def _train_adversaries(stage: int, discard: str) -> list[torch.Tensor]:
    settings = {"zero_optimization": {"stage": stage, **SHARDS}}
    judge, maker = _engine(**settings), _engine(_generator(), **settings)
    for number in range(3):
        DISCARDS[discard](judge)
        judge.backward(judge(_batch(number)).square().mean())
        made = maker(_batch(number + 3))
        judge.backward(judge(made.detach()).mean())
        judge.step()
        DISCARDS[discard](maker)
        maker.backward(-judge(made).mean())
        maker.step()
    return [*_weights(judge), *_weights(maker)]


def _train_adversaries_with_torch() -> list[nn.Parameter]:
    judge, maker = _model(), _generator()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0) for model in (judge, maker)]
    for number in range(3):
        optimizers[0].zero_grad()
        outputs = [maker(_batch(number + 3, rank)) for rank in range(2)]
        for rank, made in enumerate(outputs):
            ((judge(_batch(number, rank)).square().mean() + judge(made.detach()).mean()) / 2).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        for made in outputs:
            (-judge(made).mean() / 2).backward()
        optimizers[1].step()
    return [*judge.parameters(), *maker.parameters()]


@pytest.mark.parametrize("stage", (0, 2, 3))
@pytest.mark.parametrize("discard", DISCARDS)
def test_zero_grad_discards_gradients_of_another_engines_backward(discard: str, stage: int) -> None:
    _assert_close(run_ranks(2, _train_adversaries, stage, discard)[1], _train_adversaries_with_torch())


def _train_compiled(stage: int) -> list[torch.Tensor]:
    engine = _engine(zero_optimization={"stage": stage, **SHARDS})
    engine.compile(backend="aot_eager")
    for number in range(3):
        _step(engine, number)
    return _weights(engine)


@pytest.mark.parametrize("stage", (2, 3))
def test_compiled_engine(stage: int) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for number in range(3):
        for rank in range(2):
            (model(_batch(number, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    _assert_close(run_ranks(2, _train_compiled, stage)[1], model.parameters())


def test_fp16_gradients_of_a_module_without_loss_scale_are_scaled() -> None:
    engine = _engine(fp16={"enabled": True, "initial_scale_power": 8})
    reference = _model().half()
    x = _batch(0).half()
    engine.module(x).square().mean().backward()
    reference(x).square().mean().backward()
    for parameter, other in zip(engine.module.parameters(), reference.parameters(), strict=True):
        assert other.grad is not None
        torch.testing.assert_close(safe_get_full_grad(parameter), other.grad.float(), rtol=1e-6, atol=0)
    engine.step()
    assert engine.was_step_applied()
    with pytest.raises(RuntimeError, match="Loss scaling is required"):  # the engine's forward knows what is missing
        engine(x).square().mean().backward()


def test_selected_gradients_of_a_module_are_no_backward() -> None:
    engine = _engine()
    torch.autograd.grad(engine.module(_batch(0)).sum(), list(engine.module.parameters()))
    with pytest.raises(ConfigError, match=r"step\(\) without backward"):
        engine.step()


def test_a_second_engine_for_the_module_replaces_the_first() -> None:
    model = _model()
    first = _engine(model)
    second = _engine(model)
    model(_batch(0)).square().mean().backward()
    second.step()
    assert second.global_steps == 1 and first.global_steps == 0 and not first.core._backwards


@pytest.mark.parametrize("calls_backward", (False, True))
def test_gradients_that_the_program_writes_at_stage_0(calls_backward: bool) -> None:
    model, reference = _model(), _model()
    engine = _engine(model, torch.optim.SGD(model.parameters(), lr=0.1), gradient_clipping=0.05)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for number in range(3):
        if calls_backward:
            engine.backward(engine(_batch(number)).square().mean())
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            parameter.grad = torch.full_like(other, number - 1.5)
            other.grad = parameter.grad.clone()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        engine.step()
        optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())
    _assert_close(list(model.parameters()), reference.parameters())


def test_written_fp16_gradients_have_the_loss_scale() -> None:
    # Without ZeRO DeepSpeed halves the scale at once, whatever ``hysteresis`` is.
    engine = _engine(fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 3})
    norms = []
    for value in (0.5, torch.inf, 0.5):
        for parameter in engine.module.parameters():
            parameter.grad = torch.full_like(parameter, value)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    count = sum(parameter.numel() for parameter in engine.module.parameters())
    assert norms == pytest.approx([0.5 * count**0.5 / 16, torch.inf, 0.5 * count**0.5 / 8])
    assert engine.skipped_steps == 1 and engine.optimizer.cur_scale == 8


# Parameters without a group, sparse gradients, and checkpoints within a step.


def test_parameters_without_a_group_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr("deepspeed.runtime.choice.log_dist", lambda message, ranks: messages.append(message))
    model, reference = _model(), _model()
    engine = _engine(model, torch.optim.SGD(model[0].parameters(), lr=0.5), gradient_clipping=0.05)
    members = list(reference[0].parameters())
    optimizer = torch.optim.SGD(members, lr=0.5)
    for number in range(3):
        _step(engine, number)
        optimizer.zero_grad()
        reference(_batch(number)).square().mean().backward()
        assert nn.utils.clip_grad_norm_(members, 0.05) > 0.05
        optimizer.step()
    _assert_close(list(engine.module.parameters()), reference.parameters())
    assert messages == ["not trained, because no parameter group has them: 1.0.weight, 1.0.bias, 2.weight, 2.bias"]


class _Sparse(nn.Module):
    def __init__(self, *, is_sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(7, 4, sparse=is_sparse)
        self.head = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens)).square().mean()


def _train_sparse(stage: int) -> list[torch.Tensor]:
    model = _Sparse(is_sparse=True)
    settings = {"sparse_gradients": True, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    engine = _engine(model, torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    for step in range(3):
        engine.backward(engine(torch.tensor([step, 3 + dist.get_rank()])))
        engine.step()
    return _weights(engine)


@pytest.mark.parametrize("stage", (0, 2))
def test_sparse_gradients_equal_dense_ones(stage: int) -> None:
    model = _Sparse(is_sparse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(torch.tensor([step, 3 + rank])) / 2).backward()
        optimizer.step()
    _assert_close(run_ranks(2, _train_sparse, stage)[0], model.parameters())


def test_a_checkpoint_within_a_step_begins_the_step_again(tmp_path: Path) -> None:
    saving, plain, expected, loading = (_engine(gradient_accumulation_steps=2) for _ in range(4))
    for engine, numbers in ((saving, (0, 1, 2)), (plain, (0, 1, 2, 3)), (expected, (0, 1, 4, 5))):
        for number in numbers:
            _step(engine, number)
    saving.save_checkpoint(tmp_path)
    _step(saving, 3)
    loading.load_checkpoint(tmp_path)
    assert loading.global_steps == 1
    for number in (4, 5):
        _step(loading, number)
    _assert_close(_weights(saving), _weights(plain), 0.0)
    _assert_close(_weights(loading), _weights(expected), 0.0)


# Names of the optimizer and the engine.


def _parts_of_the_optimizer() -> tuple[float, float, float]:
    engine = _engine(bf16={"enabled": True}, zero_optimization={"stage": 1})
    assert engine.optimizer._global_grad_norm == 0.0
    engine.backward(engine(_batch(0).bfloat16()).float().square().mean())
    engine.step()
    parts = torch.stack([part.double().square().sum() for part in engine.optimizer.fp32_groups_flat]).sum()
    dist.all_reduce(parts)
    rounded = sum(float(flat.double().square().sum()) for flat in engine.optimizer.bit16_groups_flat)
    expected = sum(float(weight.double().square().sum()) for weight in _weights(engine))
    assert engine.optimizer._global_grad_norm == engine.get_global_grad_norm()
    return float(parts), rounded, expected


def test_parts_of_the_optimizer_are_those_of_the_model() -> None:
    for parts, rounded, expected in run_ranks(2, _parts_of_the_optimizer):
        assert parts == pytest.approx(expected, rel=1e-12) and rounded == pytest.approx(expected, rel=1e-2)


def test_a_model_with_a_number_of_stages_is_no_pipeline() -> None:
    model: Any = _model()
    model.num_stages = 4  # as the models of timm
    engine = _engine(model)
    _step(engine, 0)
    assert engine.global_steps == 1 and not engine.pipeline_parallelism


def test_communication_in_fp16_is_float32() -> None:
    plain, other = _engine(), _engine(communication_data_type="fp16")
    assert any("communication_data_type (gradients are sent" in note for note in other._config.translation.notes)
    for engine in (plain, other):
        _step(engine, 0)
    _assert_close(_weights(other), _weights(plain), 0.0)


# Configurations.


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_sections_of_the_configuration_equal_deepspeeds() -> None:
    theirs = ask(Task("tests.drop_in.deepspeed.traces:sections"))
    for (case, found), (_, expected) in zip(sections(), theirs, strict=True):
        if isinstance(expected, dict):
            assert isinstance(found, dict), case
            common = found.keys() & expected.keys()
            assert {name: found[name] for name in common} == {name: expected[name] for name in common}, case
            assert len(common) >= 4, case
        else:
            assert set(found) & set(expected) & {"ValidationError", "AssertionError"}, (case, found, expected)


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs hjson, which DeepSpeed needs")
def test_a_configuration_may_have_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  // of a step\n  "train_batch_size": 8,\n  "bf16": {"enabled": true},  # not fp16\n}\n')
    monkeypatch.syspath_prepend(str(REFERENCE))
    assert read_json(path) == {"train_batch_size": 8, "bf16": {"enabled": True}}
    path.write_text("{train_batch_size: 8, train_batch_size: 4}")
    with pytest.raises(ConfigError, match="'train_batch_size' occurs twice"):
        read_json(path)


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.shares: list[float] = []

    def forward(self, x: torch.Tensor, progressive_layer_drop: bool = False, pld_theta: float = -1.0) -> torch.Tensor:
        self.shares.append(pld_theta if progressive_layer_drop else -1.0)
        return self.layer(x)


def test_shares_of_layers_to_keep_follow_the_formula() -> None:
    section = {"enabled": True, "theta": 0.25, "gamma": 0.1}
    model = _Dropping()
    engine = _engine(model, gradient_accumulation_steps=2, progressive_layer_drop=section)
    for number in range(6):
        _step(engine, number)
    engine.eval()
    engine(_batch(0))
    # DeepSpeed 0.19.6: the share after step n is used in the next one; 0.19.8 has removed the section.
    after = [0.75 * math.exp(-0.1 * step) + 0.25 for step in range(3)]
    assert model.shares == pytest.approx([1.0, 1.0, after[0], after[0], after[1], after[1], -1.0], rel=1e-15)
    assert engine.get_pld_theta() == pytest.approx(after[2], rel=1e-15)
    assert _engine().get_pld_theta() is None


def test_optimizers_of_mup(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs the package mup"):
        _engine_of_mup({"lr": 0.1})
    package: Any = ModuleType("mup")
    package.__spec__ = ModuleSpec("mup", None)

    def halved(params: Any, lr: float, **others: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [p], "lr": lr / (1 + (p.dim() > 1))} for p in params], **others)

    package.MuAdamW = halved
    monkeypatch.setitem(sys.modules, "mup", package)
    engine, reference = _engine_of_mup({"lr": 0.1, "weight_decay": 0.0}), _model()
    optimizer = halved(reference.parameters(), 0.1, weight_decay=0.0)
    for number in range(3):
        _step(engine, number)
        optimizer.zero_grad()
        reference(_batch(number)).square().mean().backward()
        optimizer.step()
    _assert_close(list(engine.module.parameters()), reference.parameters())


def _engine_of_mup(params: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    config = {**CONFIG, "optimizer": {"type": "muadamw", "params": params}}
    return deepspeed.initialize(model=_model(), config=config)[0]


def test_copies_of_the_engines_module_are_independent() -> None:
    engine = _engine()
    stored = io.BytesIO()
    torch.save(engine.module, stored)
    stored.seek(0)
    for copied in (copy.deepcopy(engine.module), torch.load(stored, weights_only=False)):
        copied(_batch(0)).sum().backward()
        assert copied[2].weight.grad is not None and not engine.core._backwards


def _generate_as_trl(stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs for inputs of another number on each rank, with the calls of trl 1.16, and the weights after a step."""
    engine = _engine(zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})
    _step(engine, 0)
    assert hasattr(engine.optimizer, "parameter_offload") == (stage == 3)
    outputs = []
    with deepspeed.zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
        if stage == 3:
            offload = engine.optimizer.parameter_offload
            assert [*offload.module.ds_external_parameters()] == []
            for parameter in offload.module.parameters():
                parameter.ds_active_sub_modules.clear()
            for hook in (*offload.forward_hooks, *offload.backward_hooks):
                hook.remove()
            offload.forward_hooks, offload.backward_hooks = [], []
        outputs = [engine.module(_batch(number)) for number in range(2 + dist.get_rank())]
        if stage == 3:
            offload._register_deepspeed_module(offload.module)
    _step(engine, 1)
    return outputs, _weights(engine)


def test_trl_generates_with_gathered_weights() -> None:
    for expected, found in zip(*(run_ranks(2, _generate_as_trl, stage) for stage in (0, 3)), strict=True):
        for values, reference in zip(found, expected, strict=True):
            _assert_close(values, reference)
