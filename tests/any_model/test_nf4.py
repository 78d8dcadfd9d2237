"""QLoRA: weights of 4 bits are those of the paper's formula, and adapters train as with the restored weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn import functional

import megatron_core
from megatron_core.any_model.nf4 import NF4Linear
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.models import throughout_float64
from tests.defects.plant import planted

# Dettmers et al. 2023, appendix E.
PAPER = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def _expected(weight: np.ndarray) -> np.ndarray:
    """Equation 5 of the paper without double quantization, in float64."""
    flat = np.pad(weight.ravel(), (0, -weight.size % 64)).reshape(-1, 64)
    maxima = np.abs(flat).max(1, keepdims=True)
    nearest = np.abs((flat / maxima)[..., None] - np.array(PAPER)).argmin(-1)
    return (np.array(PAPER)[nearest] * maxima).ravel()[: weight.size].reshape(weight.shape)


@pytest.mark.parametrize("shape", [(64, 128), (7, 33)])
def test_weights_are_those_of_the_paper(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0], bias=False)
    weight = linear.weight.detach().double().numpy()
    expected = _expected(weight)
    identity = torch.eye(shape[1], dtype=torch.float64)
    restored = NF4Linear(linear, double_quantization=False)(identity).T.numpy()
    assert np.abs(restored - expected).max() < 1e-12
    # Double quantization rounds a maximum by at most 2^-4 of the largest difference to their mean.
    maxima = np.abs(np.pad(weight.ravel(), (0, -weight.size % 64)).reshape(-1, 64)).max(1)
    doubled = NF4Linear(linear)
    error = np.abs(doubled(identity).T.numpy() - expected).max()
    assert 0 < error < 2**-4 * np.abs(maxima - maxima.mean()).max() * 1.01


def test_bits_of_a_weight() -> None:
    layer = NF4Linear(nn.Linear(1024, 1024, bias=False))
    bits = 8 * sum(tensor.nbytes for tensor in layer.state_dict().values()) / 1024**2
    assert 4 + 8 / 64 < bits < 4.128  # the paper: 0.127 bits for scales


def test_gradients_are_those_of_the_restored_weights() -> None:
    torch.manual_seed(0)
    layer = NF4Linear(nn.Linear(10, 6).double())
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    restored = layer(torch.eye(10, dtype=torch.float64)).T - layer.bias[:, None]
    (layer(x) ** 2).sum().backward()
    again = x.detach().requires_grad_()
    (functional.linear(again, restored, layer.bias) ** 2).sum().backward()
    assert (x.grad - again.grad).abs().max() < 1e-12


class Adapted(nn.Module):
    """A frozen linear layer with an adapter, named as peft's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter."""
        return x + torch.tanh(self.base_layer(x) + self.up(self.down(x)))


def _model(*, restored: bool = False, width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(width) for _ in range(3))).double()
    assert megatron_core.quantize_frozen(model) == ["0.base_layer", "1.base_layer", "2.base_layer"]
    for layer in model if restored else ():
        linear = nn.Linear(width, width).double().requires_grad_(False)
        with torch.no_grad():
            linear.weight.copy_(
                layer.base_layer(torch.eye(width, dtype=torch.float64)).T - layer.base_layer.bias[:, None]
            )
            linear.bias.copy_(layer.base_layer.bias)
        layer.base_layer = linear
    return model


def _batches() -> torch.Tensor:
    return torch.randn(3, 4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _plain() -> list[float]:
    model = _model(restored=True)
    update = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in _batches():
        loss = model(batch).square().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


def _engine(stage: int, folder: str) -> tuple[list[float], int]:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = {"zero_stage": stage, "fp64": True, "micro_batch_size": 4 // ranks, "global_batch_size": 4, "lr": 1e-2}
    config |= {"weight_decay": 0.01, "clip_grad": 0.0}
    engine = megatron_core.initialize(_model(), config, lambda p: torch.optim.AdamW(p, lr=1e-2)).engine
    losses = []
    for batch in _batches():
        engine.backward(engine(batch.chunk(ranks)[rank]).square().mean())
        losses.append(engine.step().loss)
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    return losses, engine.data_parallel.resident_bytes()["weights"]


def _fully_shard(_: None) -> list[float]:
    model: Any = _model()
    for layer in model:
        megatron_core.fully_shard(layer)
    megatron_core.fully_shard(model)
    update = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for batch in _batches():
        loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()]).square().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


@pytest.mark.every_case
@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_trains_as_one_process_with_the_restored_weights(stage: int, tmp_path) -> None:
    expected = _plain()
    whole = sum(parameter.nbytes for parameter in _model().parameters())
    for losses, weights in run_ranks(2, _engine, stage, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert weights == whole if stage == 0 else weights < 0.8 * whole  # biases stay whole


def test_fully_shard_trains_as_one_process_with_the_restored_weights() -> None:
    for losses in run_ranks(2, _fully_shard, None, backend="gloo"):
        assert losses == pytest.approx(_plain(), rel=1e-9)


# A model of transformers with adapters of peft, split by tensor parallelism.


def _with_adapters() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=32, num_key_value_heads=2, attention_bias=True, **sizes)
    chosen = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), chosen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or name.endswith("bias"):
                parameter.normal_(std=0.05)
    return model


def _doubly_quantized(weight: torch.Tensor) -> torch.Tensor:
    """Section 3 of the paper, in float64 except for the rounding of scales to float8."""
    flat = weight.double().reshape(-1, 64)
    maxima = flat.abs().amax(1)
    mean = maxima.float().mean().double()
    centred = functional.pad(maxima.float() - maxima.float().mean(), (0, -len(maxima) % 256)).view(-1, 256)
    outer = centred.abs().amax(1, keepdim=True) / 448
    rounded = (centred / outer).to(torch.float8_e4m3fn).double() * outer.double()
    scales = rounded.flatten()[: len(maxima)] + mean
    nearest = ((flat / maxima[:, None])[..., None] - torch.tensor(PAPER, dtype=torch.float64)).abs().argmin(-1)
    return (torch.tensor(PAPER, dtype=torch.float64)[nearest] * scales[:, None]).view(weight.shape)


def _tokens() -> torch.Tensor:
    return torch.randint(32, (3, 4, 8), generator=torch.Generator().manual_seed(0))


def _restored_model() -> nn.Module:
    """The model in float64 with the weights that the codes of 4 bits stand for."""
    model = _with_adapters()
    restored = {
        name: _doubly_quantized(parameter.detach())
        for name, parameter in model.named_parameters()
        if name.endswith("base_layer.weight")
    }
    assert len(restored) == 14
    model.double()
    with torch.no_grad():
        for name, value in restored.items():
            model.get_parameter(name).copy_(value)
    return model


def _train_adapters_with_torch() -> tuple[list[float], dict[str, np.ndarray]]:
    model = _restored_model()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    update = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for tokens in _tokens():
        with throughout_float64(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses, {name: parameter.detach().numpy() for name, parameter in trained.items()}


def _train_split_adapters(
    settings: dict[str, Any], save: str | None = None, load: str | None = None
) -> tuple[list[float], dict[str, np.ndarray], int, int]:
    model = _with_adapters()
    whole = sum(parameter.nbytes for name, parameter in model.named_parameters() if name.endswith("base_layer.weight"))
    if "tensor_model_parallel_size" in settings:
        model = megatron_core.parallelize(model, tensor=settings["tensor_model_parallel_size"])
    assert len(megatron_core.quantize_frozen(model)) == 14
    config = {"fp64": True, "micro_batch_size": 4, "global_batch_size": 4, "lr": 1e-2, "clip_grad": 0.0, **settings}
    engine = megatron_core.initialize(model, config, lambda p: torch.optim.AdamW(p, lr=1e-2)).engine
    if load is not None:
        engine.load_checkpoint(load)
    losses = []
    size, index = engine.groups.size("dp"), engine.groups.index("dp")
    for tokens in _tokens() if load is None else ():
        local = tokens.chunk(size)[index]
        with throughout_float64(engine):
            engine.backward(engine(input_ids=local, labels=local).loss)
        losses.append(engine.step().loss)
    if save is not None:
        engine.save_checkpoint(save)
    state = {name: tensor.numpy() for name, tensor in engine.full_state_dict().items()}
    codes = sum(parameter.numel() for name, parameter in engine.module.named_parameters() if name.endswith(".codes"))
    return losses, state, codes, whole // 8


TENSOR2: dict[str, Any] = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize("settings", [TENSOR2, TENSOR2 | {"zero_stage": 3, "micro_batch_size": 2}])
def test_layers_split_by_tensor_parallelism(settings: dict[str, Any], tmp_path: Path) -> None:
    losses, trained = _train_adapters_with_torch()
    ranks = 4 if "zero_stage" in settings else 2
    results = run_ranks(ranks, _train_split_adapters, settings, str(tmp_path))
    ((_, state_of_one, *_),) = run_ranks(1, _train_split_adapters, {}, None, str(tmp_path))  # loads the checkpoint
    for found, state, codes, whole in results:
        assert found == pytest.approx(losses, rel=1e-9)
        for name, expected in trained.items():
            assert np.abs(state[name] - expected).max() < 1e-9 * np.abs(expected).max()
        assert state.keys() == state_of_one.keys()
        for name, value in state.items():  # the codes and scales too
            assert np.array_equal(value, state_of_one[name]), name
        assert codes == whole // 2


NF4, TENSOR = "any_model.nf4:", "any_model.tensor:"
DEFECTS: dict[str, tuple[str, str, str]] = {
    "a level is rounded down": (NF4 + "quantize", "(levels[1:] + levels[:-1]) / 2", "levels[1:]"),
    "both weights of a byte are exchanged": (
        *(NF4 + "quantize", "pairs[..., 0] * 16 + pairs[..., 1]", "pairs[..., 1] * 16 + pairs[..., 0]"),
    ),
    "scales are not moved back by their mean": (NF4 + "dequantize", " + outer_scales[-1]", ""),
    "scales of blocks are those of the next block": (
        *(NF4 + "SplitNF4Linear.outer_blocks", "// OUTER_BLOCK", "// OUTER_BLOCK * 0"),
    ),
    "every rank has the codes of the first columns": (
        *(NF4 + "SplitNF4Linear._local", "(start // size, stop // size)", "(0, stop // size - start // size)"),
    ),
    "a part of the inputs is not summed": (
        TENSOR + "split_product",
        "reduce_from_region(product(local, None), group)",
        "product(local, None)",
    ),
    "backward multiplies with the transposed weight": (
        NF4 + "_Product.backward",
        "gradient @ weight",
        "gradient @ weight.t()",
    ),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", DEFECTS)
def test_comparison_finds(name: str) -> None:
    losses, trained = _train_adapters_with_torch()
    with planted(*DEFECTS[name]):
        try:
            results = run_ranks(2, _train_split_adapters, TENSOR2, timeout=30.0)
        except RankFailure:
            return  # an error is found, too
    for found, state, *_ in results:
        errors = [np.abs(state[name] - value).max() / np.abs(value).max() for name, value in trained.items()]
        assert max(errors, default=0.0) > 1e-6 or found != pytest.approx(losses, rel=1e-6)


def test_adapters_are_merged_into_restored_weights() -> None:
    model: Any = _with_adapters()
    names = megatron_core.quantize_frozen(model)
    assert megatron_core.restore_frozen(model, torch.float64) == names
    merged = model.double().merge_and_unload()
    expected: Any = _restored_model()
    expected = expected.merge_and_unload()
    assert not any(isinstance(module, NF4Linear) for module in merged.modules())
    for name, parameter in expected.named_parameters():
        assert (merged.get_parameter(name) - parameter).abs().max() < 1e-12, name
    again: Any = _with_adapters().bfloat16()
    megatron_core.quantize_frozen(again)
    megatron_core.restore_frozen(again)
    assert {parameter.dtype for parameter in again.merge_and_unload().parameters()} == {torch.bfloat16}


def test_parts_of_blocks_are_refused() -> None:
    for text in run_ranks(2, _refused_parts, None):
        assert "self_attn.o_proj.base_layer.weight of shape (64, 64) over 2 tensor-parallel ranks has blocks of" in text


def test_dora_is_not_split() -> None:
    for text in run_ranks(2, _split_dora, None):
        assert "q_proj has an adapter with use_dora=True" in text


def _split_dora(_: None) -> str:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    with pytest.raises(ConfigError) as error:
        megatron_core.parallelize(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], use_dora=True)))
    return str(error.value)


def _refused_parts(_: None) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    megatron_core.parallelize(model, tensor=2)
    with pytest.raises(ConfigError) as error:
        megatron_core.quantize_frozen(model)
    megatron_core.quantize_frozen(model, ["*.q_proj.base_layer"])
    with pytest.raises(ConfigError, match=r"q_proj\.base_layer has a part of its weight"):
        megatron_core.restore_frozen(model)
    return str(error.value)


def test_layers_that_cannot_be_quantized_are_named() -> None:
    with pytest.raises(ConfigError, match=r"no module of the model has a name like \*\.base_layer"):
        megatron_core.quantize_frozen(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"0\.weight is trained"):
        megatron_core.quantize_frozen(nn.Sequential(nn.Linear(2, 2)), ["0"])
    with pytest.raises(ConfigError, match="0 is a LayerNorm"):
        megatron_core.quantize_frozen(nn.Sequential(nn.LayerNorm(2)), ["*"])
