"""FP8 products in the linear layers of models of the caller."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import megatron_core
from megatron_core.any_model import fp8
from megatron_core.errors import ConfigError
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.models import (
    BATCH,
    COMMON,
    STEPS,
    Result,
    call,
    difference,
    loss_in,
    model_of,
    samples_of,
    throughout_float64,
    train_in_stages,
    train_with_engine,
    train_with_torch,
)
from tests.defects.plant import planted
from tests.runs import tiny_config

TENSORWISE = {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The definition of tensorwise: x with a scale of (largest number) / amax in float32, rounded to ``dtype``."""
    scale = (torch.finfo(dtype).max / x.abs().amax()).float().double()
    most = torch.finfo(dtype).max
    return (x * scale).clamp(-most, most).to(dtype).double() / scale


class _Product(torch.autograd.Function):
    """y = x W^T + b with rounded matrices in all three products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        a, b = _rounded(x, torch.float8_e4m3fn), _rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(a, b)
        ctx.has_bias = bias is not None
        y = a @ b.t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        a, b = ctx.saved_tensors
        g = _rounded(grad, torch.float8_e5m2)
        return g @ b, g.flatten(0, -2).t() @ a.flatten(0, -2), grad.flatten(0, -2).sum(0) if ctx.has_bias else None


def _round_products(model: Any) -> None:
    """Round the products of linear layers inside of decoder layers, if their extents are multiples of 16."""
    count = 0
    for name, module in model.named_modules():
        is_inside = ".h." in name or ".layers." in name
        if is_inside and isinstance(module, nn.Linear | Conv1D) and all(n % 16 == 0 for n in module.weight.shape):
            turned = isinstance(module, Conv1D)
            module.forward = lambda x, own=module, turned=turned: _Product.apply(
                x, own.weight.t() if turned else own.weight, own.bias
            )
            count += 1
    assert count
    model.fp8 = True


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(name, **settings)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "ranks", "settings"),
    [
        ("gpt2", 1, {}),
        ("llama", 2, {"zero_stage": 3}),
        ("gpt2", 2, {"tensor_model_parallel_size": 2}),
        ("llama", 2, {"zero_stage": 3, "recompute_granularity": "full"}),
    ],
    ids=["one-rank", "zero3", "tp2", "zero3-recompute"],
)
def test_equals_the_definition(name: str, ranks: int, settings: dict[str, Any]) -> None:
    found = run_ranks(ranks, _train, name, {**TENSORWISE, **settings})[0]
    assert difference(found, train_with_torch(name, prepare=_round_products)) < 1e-9
    assert difference(found, train_with_torch(name)) > 1e-4, "FP8 changes results"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(linear.group, ALONE) if splits_input", "(ALONE, ALONE) if splits_input"),
        ("else (ALONE, linear.group)", "else (ALONE, ALONE)"),
    ],
    ids=["amax of a part of the input", "amax of a part of the output"],
)
def test_scales_of_parts_are_noticed(old: str, new: str) -> None:
    with planted("any_model.fp8:_in_fp8", old, new), pytest.raises(AssertionError):
        test_equals_the_definition("gpt2", 2, {"tensor_model_parallel_size": 2})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise", "mxfp8"])
def test_ranks_and_stages_change_nothing(recipe: str) -> None:
    settings = {"fp8_format": "e4m3", "fp8_recipe": recipe}
    alone = train_with_engine("gpt2", **settings)
    assert difference(run_ranks(2, _train, "gpt2", {**settings, "zero_stage": 2})[0], alone) < 1e-9


PP2 = {"pipeline_model_parallel_size": 2, "global_batch_size": BATCH}


def test_stages_equal_the_definition() -> None:
    settings = {**TENSORWISE, **PP2, "num_virtual_stages_per_pipeline_rank": 2}
    found = run_ranks(2, train_in_stages, "gpt2 of 4 layers", STEPS, settings)[0]
    assert difference(found, train_with_torch("gpt2 of 4 layers", prepare=_round_products)) < 1e-9
    settings = {"fp8_format": "hybrid", "fp8_recipe": "delayed"}
    found = run_ranks(4, train_in_stages, "llama", STEPS, {**settings, **PP2, "zero_stage": 3})[0]
    del found["gradients"]  # of this rank's stage
    assert difference(found, train_with_engine("llama", **settings)) < 1e-9


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


def _in_stages(stages: int, settings: dict[str, Any]) -> list[tuple[float, float]]:
    layers = [megatron_core.LayerSpec(nn.Linear, 16, 16), *[megatron_core.LayerSpec(_Block) for _ in range(3)]]
    model = megatron_core.PipelineModule([*layers, nn.Tanh()], loss_fn=nn.functional.mse_loss)
    config = {**COMMON, "global_batch_size": 2, "pipeline_model_parallel_size": stages}
    engine = megatron_core.initialize(model, {**config, **settings}).engine
    assert len(engine.fp8.layers) == 6 if stages == 1 else len(engine.fp8.layers) in (2, 4)
    x = torch.randn(8, 16, 16, generator=torch.Generator().manual_seed(0)).double()
    batches, found = ((each, each.roll(1)) for each in x), []
    for _ in range(3):
        report = engine.train_batch(batches)
        found.append((report.loss, report.grad_norm))
    return found


def test_layers_of_a_pipeline_module() -> None:
    settings = {"fp8_format": "e4m3", "fp8_recipe": "delayed"}
    (expected,) = run_ranks(1, _in_stages, 1, settings)
    for found in run_ranks(2, _in_stages, 2, {**settings, "pipeline_schedule": "zb_h1"}):
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def _losses(loader: Any, engine: Any, steps: int) -> list[float]:
    found, batches = [], iter(loader)
    while len(found) < steps:
        with throughout_float64(engine):
            engine.backward(loss_in(call(engine, next(batches))))
        report = engine.step()
        if report is not None:
            found.append(report.loss)
    return found


def test_a_resumed_run_has_the_amax_histories(tmp_path: Any) -> None:
    config = {**COMMON, "global_batch_size": BATCH, "fp8_format": "hybrid", "fp8_amax_history_len": 3}
    config["fp8_amax_compute_algo"] = "max"

    def start() -> Any:
        return megatron_core.initialize(model_of("gpt2"), config, training_data=samples_of("gpt2"), shuffle=False)

    engine, _, loader, _ = start()
    _losses(loader, engine, 2)
    engine.save_checkpoint(str(tmp_path))
    expected = _losses(loader, engine, 1)
    engine, _, loader, _ = start()
    engine.load_checkpoint(str(tmp_path))
    assert all(layer.history is not None for layer in engine.fp8.layers.values())
    assert _losses(loader, engine, 1) == expected


def test_a_model_without_suitable_layers_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no linear layer inside of a unit has extents that are multiples of 16"):
        megatron_core.initialize(model_of("convolutions"), {**COMMON, "global_batch_size": BATCH, **TENSORWISE})


def test_narrow_gathers_are_an_error() -> None:
    with pytest.raises(ConfigError, match="fp8_param_gather=True on a model of your own: gathered weights would be"):
        megatron_core.initialize(model_of("gpt2"), {**TENSORWISE, "zero_stage": 1, "fp8_param_gather": True})


def test_split_blocks_are_an_error() -> None:
    settings = {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "tensor_model_parallel_size": 2}
    with pytest.raises(RankFailure, match=r"attn\.c_attn has 24 features on each tensor-parallel rank"):
        run_ranks(2, _train, "gpt2", settings)


def _refused_on_the_second_rank() -> str:
    def refuse(path: str, *_: object) -> NoReturn:
        raise ConfigError(f"blocks of {path}")

    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(16, 16) if rank else nn.Identity())
    config = tiny_config(**TENSORWISE)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as found:
        patch.setattr(fp8, "_in_fp8", refuse)
        fp8.multiply_in_fp8(model, [[model]], config, ParallelGroups(Grid(dp=2), rank), torch.device("cpu"))
    return str(found.value)


def test_a_layer_that_one_rank_refuses_is_an_error_on_all() -> None:
    """Pipeline stages have different layers."""
    assert run_ranks(2, _refused_on_the_second_rank) == ["rank 1: blocks of 0", "blocks of 0"]
