"""Whole weights, gradients and optimizer state of parameters at every ZeRO stage."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core.any_model import Engine
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

ROWS: list[dict[str, Any]] = [
    {},
    {"zero_stage": 1, "overlap_grad_reduce": True},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 3, "zero3_keep_after_forward": True, "overlap_param_gather": True},
    {"zero_stage": 3, "zero3_param_persistence_threshold": 5, "overlap_param_gather": True},
]


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))


def _points() -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _engine(**settings: Any) -> Engine:
    config = {"micro_batch_size": 1, "global_batch_size": 4, "lr": 0.1, "clip_grad": 0.0, "weight_decay": 0.0}
    return megatron_core.initialize(_mlp(), {**config, **settings}).engine


def _backward(engine: Engine) -> None:
    """All micro-batches of a step, without the step."""
    rank, accumulation = torch.distributed.get_rank(), engine.gradient_accumulation_steps
    for number in range(accumulation):
        point = _points()[torch.distributed.get_world_size() * number + rank]
        engine.backward(engine(point).square().sum())
        if number < accumulation - 1:
            engine.step()


@pytest.mark.parametrize(("ranks", "row"), [*((2, row) for row in ROWS), (4, ROWS[3])])
def test_reads_and_writes(ranks: int, row: dict[str, Any]) -> None:
    if ranks == 4:
        row = {**row, "num_distributed_optimizer_instances": 2}
    model = _mlp().double()
    (model(_points()).square().sum() / 4).backward()
    for found in run_ranks(ranks, _read_and_write, row):
        for name, parameter in model.named_parameters():
            gradient, weights = found["gradients"][name], parameter.detach()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)
            # The written gradient and moments determine the step: m = 0.1 * 2 + 0.9 * 3, v = 0.001 * 4 + 0.999 * 5.
            update = 0.1 * (2.9 / 0.1) / ((4.999 / 0.001) ** 0.5 + 1e-8)
            if name == "2.weight":
                assert (found["kept"] == 7.0).all()
                weights = torch.full_like(weights, 7.0)
            torch.testing.assert_close(found["weights"][name], weights - update, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(found["second"][name], torch.full_like(weights, 4.999))


def _read_and_write(row: dict[str, Any]) -> dict[str, Any]:
    engine = _engine(fp64=True, adam_beta2=0.999, **row)
    model, whole = engine.module, engine.whole
    with engine.gathered(model[2].parameters(), modify=True, source=1), torch.no_grad():
        assert model[2].weight.norm() > 0
        model[2].weight.fill_(6.0 + torch.distributed.get_rank())
    with engine.gathered(model[2].weight):
        engine(_points()[0])  # a forward inside of a context leaves the weights whole
        kept = model[2].weight.detach().clone()
        with pytest.raises(ConfigError, match="end the context first"):
            engine.step()
    with engine.gathered(model[2].weight, modify=True), torch.no_grad():
        before = model[2].weight.detach().clone()
        model[2].weight.copy_(_mlp()[2].weight)
    _backward(engine)
    gradients = {name: whole.gradient(p).clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        whole.set_gradient(parameter, torch.full_like(gradients[name], 2.0))
        assert (whole.gradient(parameter) == 2.0).all()
        assert whole.state_names(parameter) == ["exp_avg", "exp_avg_sq"]
        whole.set_state(parameter, "exp_avg", torch.full_like(gradients[name], 3.0))
        whole.set_state(parameter, "exp_avg_sq", torch.full_like(gradients[name], 5.0))
    whole.set_weights(model[2].weight, before)
    assert engine.step() is not None
    second = {name: whole.state(p, "exp_avg_sq") for name, p in model.named_parameters()}
    return {"kept": kept, "gradients": gradients, "weights": engine.full_state_dict(), "second": second}


def test_main_weights_keep_their_bits() -> None:
    for row in ({}, {"zero_stage": 3}):
        for before, after, kept in run_ranks(2, _half, row):
            assert (before != before.bfloat16().float()).any()
            assert (after.flatten()[1:] == before.flatten()[1:]).all()
            assert after[0, 0] == kept[0, 0] == 0.5


def _half(row: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    engine = _engine(bf16=True, **row)
    _backward(engine)
    engine.step()
    weight = engine.module[0].weight
    before = engine.whole.weights(weight)
    with engine.gathered(engine.module.parameters(), modify=True), torch.no_grad():
        weight[0, 0] = 0.5
    return before, engine.whole.weights(weight), engine.full_state_dict()["0.weight"]


def test_bad_use() -> None:
    model = _mlp()
    model[0].bias.requires_grad_(False)
    engine = megatron_core.initialize(model, {"global_batch_size": 1}).engine
    with pytest.raises(ConfigError, match=r"the parameter of shape \(5,\) is not trained by this engine"):
        engine.whole.gradient(engine.module[0].bias)
    with pytest.raises(ConfigError, match="optimizer state 'momentum' does not exist; this optimizer has exp_avg"):
        engine.whole.state(engine.module[0].weight, "momentum")
    with pytest.raises(ConfigError, match=r"value of shape \(3,\) must have the shape \(5, 3\)"):
        engine.whole.set_weights(engine.module[0].weight, torch.zeros(3))
    with (
        pytest.raises(ConfigError, match="source=1 must be a data-parallel rank from 0 to 0"),
        engine.gathered([], source=1),
    ):
        pass


OPERATIONS: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "data.fill_": lambda _, p: p.data.fill_(1.0),
    "add_": lambda _, p: p.add_(1.0),
    "data.norm": lambda _, p: p.data.norm(),
    "state_dict": lambda model, _: torch.save(model.state_dict(), io.BytesIO()),
    "save": lambda _, p: torch.save(p, io.BytesIO()),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "init": lambda _, p: nn.init.normal_(p),
    "other dtype": lambda _, p: p.to(torch.bfloat16),
    "product": lambda _, p: nn.functional.linear(torch.ones(2, 5), p),
    "index": lambda _, p: p[0],
    "numpy": lambda _, p: p.detach().numpy(),
    "assign": lambda _, p: setattr(p, "data", torch.ones(5, 5)),
    "vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()),
}
"""Functions that need the elements of a parameter in shards."""


def test_parameter_in_shards_is_an_error_without_a_crash() -> None:
    for texts, description, kept, losses in run_ranks(2, _use_split_parameter):
        for name, text in texts.items():
            first = "0" if name in ("state_dict", "deepcopy", "vector") else "2"
            assert text.startswith(f"{first}.weight of shape (5, {3 if first == '0' else 5})"), (name, text)
            assert "is split over 2 ranks by ZeRO 3" in text and "engine.gathered(" in text
        assert "2.weight" in description and "(5, 5)" in description
        # Tensors of a context keep its values after it.
        torch.testing.assert_close(kept["2.weight"], _mlp()[2].weight.detach().double())
        assert losses[0] == losses[1]


def _use_split_parameter() -> tuple[dict[str, str], str, dict[str, Tensor], list[float]]:
    engine = _engine(zero_stage=3, fp64=True)
    model, parameter = engine.module, engine.module[2].weight
    texts = {}
    for name, call in OPERATIONS.items():
        with pytest.raises(ConfigError) as error, torch.no_grad():
            call(model, parameter)
        texts[name] = str(error.value)
    # What describes the parameter works, and functions of C++ that ignore the class read NaN instead of freed memory.
    assert parameter.shape == (5, 5) and parameter.numel() == 25 and isinstance(parameter, nn.Parameter)
    assert torch.zeros_like(parameter).sum() == 0 and parameter.to("cpu", torch.float64) is parameter
    model.to("cpu")
    with pytest.warns(UserWarning, match="copy construct"):
        assert torch.tensor(parameter).isnan().all()
    with pytest.raises(ConfigError, match=r"2\.weight"):
        torch.optim.Adam(model.parameters()).param_groups[0]["params"][2].mul_(2.0)
    torch.optim.SGD(model.parameters(), 1.0).step()
    with engine.gathered(model.parameters()):
        assert type(parameter) is nn.Parameter
        kept = model.state_dict()
    losses = []
    for each in (engine, _engine(zero_stage=3, fp64=True)):
        for _ in range(2):
            _backward(each)
            report = each.step()
        assert report is not None
        losses.append(report.loss)
    return texts, f"{parameter}", {name: each.clone() for name, each in kept.items()}, losses


def test_peft_saves_whole_modules_beside_adapters_at_stage_3() -> None:
    (expected, _), found = (run_ranks(2, _adapter_files, {"zero_stage": stage}) for stage in (0, 3))
    assert any(name.startswith("base_model.model.4") for name in expected)
    for files in found:
        torch.testing.assert_close(files, expected, rtol=1e-12, atol=0)


def _adapter_files(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors that ``save_pretrained`` writes: it reads the keys of one ``state_dict()``, the values of another."""
    adapters = peft.LoraConfig(r=2, target_modules=["2"], modules_to_save=["4"], init_lora_weights=False)
    model = peft.get_peft_model(_mlp(), adapters)
    config = {"fp64": True, "micro_batch_size": 1, "global_batch_size": 4, "lr": 0.1, **settings}
    engine = megatron_core.initialize(model, config).engine
    _backward(engine)
    engine.step()
    files: dict[str, Tensor] = peft.get_peft_model_state_dict(model, engine.full_state_dict())
    if settings["zero_stage"] == 3:
        entries = model.state_dict()
        name = "base_model.model.2.base_layer.weight"
        assert entries[name].shape == (5, 5)
        for read in (torch.sum, Tensor.data_ptr, copy.deepcopy, lambda entry: torch.save(entry, io.BytesIO())):
            with pytest.raises(ConfigError, match=rf"{name} of shape \(5, 5\) .* is split over 2 ranks"):
                read(entries[name])
    return {name: value.clone() for name, value in files.items()}


def test_small_weights_stay_whole_at_stage_3() -> None:
    for biases, refused in run_ranks(2, _small):
        assert refused == ["0.weight", "2.weight"]
        for bias, full in biases:
            torch.testing.assert_close(bias, full, rtol=0, atol=0)


def _small() -> tuple[list[tuple[Tensor, Tensor]], list[str]]:
    """Read each parameter after a step: those of at most 5 elements directly, the others are refused."""
    engine = _engine(fp64=True, zero_stage=3, zero3_param_persistence_threshold=5)
    _backward(engine)
    engine.step()
    weights = engine.full_state_dict()
    biases, refused = [], []
    for name, parameter in engine.module.named_parameters():
        try:
            biases.append((parameter.detach().clone(), weights[name]))
        except ConfigError:
            refused.append(name)
    return biases, refused
