"""The dtype of training: that of the settings, else that of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_core
from megatron_core.any_model.layers import LayerSpec, PipelineModule
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import RankFailure, run_ranks

BATCH = {"micro_batch_size": 1, "global_batch_size": 1}


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def _trained(model: nn.Module, **settings: Any) -> torch.dtype:
    """The dtype of the output and of the weights after a step."""
    engine = megatron_core.initialize(model, {**BATCH, **settings}).engine
    output = engine(torch.ones(2, 3))
    engine.backward(output.float().square().mean())
    engine.step()
    assert {p.dtype for p in engine.module.parameters()} == {output.dtype}
    return output.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_models_own_dtype(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    assert _trained(_model(dtype)) == dtype
    switch = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    note = (
        f"note: {switch}=True, the dtype of the model's parameters; set bf16, fp16 or fp64, or bf16=False for float32\n"
    )
    assert capsys.readouterr().err == ("" if switch is None else note)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"bf16": True}, torch.bfloat16), ({"fp64": True}, torch.float64), ({"bf16": False}, torch.float32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_settings_decide(settings: dict[str, Any], expected: torch.dtype, dtype: torch.dtype) -> None:
    assert _trained(_model(dtype), **settings) == expected


def test_float64_is_not_rounded() -> None:
    model = _model(torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = megatron_core.initialize(model, {**BATCH, "zero_stage": 2}).engine.full_state_dict()
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_several_dtypes() -> None:
    model = _model(torch.float32)
    model[2].bfloat16()
    with pytest.raises(ConfigError, match=r"several dtypes \(0.* is torch.float32, 2.* is torch.bfloat16\): set bf16"):
        megatron_core.initialize(model, BATCH)
    assert _trained(model, bf16=True) == torch.bfloat16


def test_ranks_with_other_dtypes() -> None:
    with pytest.raises(RankFailure, match="rank 0 has fp64=False, and rank 1 has True"):
        run_ranks(2, _different)


def _different() -> None:
    megatron_core.initialize(_model((torch.float32, torch.float64)[dist.get_rank()]), {**BATCH, "global_batch_size": 2})


class _Double(nn.Linear):
    """A layer that constructs its parameters in float64."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, dtype=torch.float64)


@pytest.mark.parametrize("spec", [LayerSpec(_Double, 3, 1), _Double(3, 1)], ids=["LayerSpec", "module"])
def test_layers_of_a_pipeline(spec: Any) -> None:
    def engine(**settings: Any) -> Any:
        module = PipelineModule([spec, nn.Tanh()], loss_fn=nn.functional.mse_loss)
        return megatron_core.initialize(module, {**BATCH, **settings}).engine

    with pytest.raises(ConfigError, match=r"is torch\.float64, and config has no dtype: set bf16, fp16 or fp64"):
        engine()  # layers are constructed after the settings have been read
    assert {p.dtype for p in engine(fp64=True).module.parameters()} == {torch.float64}
    assert {p.dtype for p in engine(bf16=False).module.parameters()} == {torch.float32}
