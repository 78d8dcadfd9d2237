"""Messages rounded in blocks (ZeRO++) against the formula in float64, their sums, gathers and bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import megatron_core
from megatron_core.errors import ConfigError
from megatron_core.features.compression.blocks import BLOCK, decode_blocks, encode_blocks
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted

WIDTH = 32


def _formula(values: torch.Tensor, bits: int) -> np.ndarray:
    """DeepSpeed's symmetric quantization (csrc/includes/quantization_utils.h) in float64: x -> q / scale."""
    flat = values.double().numpy()
    result = np.empty_like(flat)
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        largest = np.abs(block).max()
        scale = 2.0**bits / (2 * largest) if largest else 1.0
        q = np.clip(np.rint(block * scale), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        result[start : start + BLOCK] = q / scale
    return result


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("count", (8, 256, 1000))
def test_rounding_is_that_of_deepspeed(bits: int, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * torch.logspace(-3, 3, count)
    values[: count // 4] = 0
    message = encode_blocks(values, bits)
    blocks = -(-count // BLOCK)
    assert message.dtype == torch.uint8 and message.numel() == count * bits // 8 + 4 * blocks
    np.testing.assert_allclose(decode_blocks(message, bits, count).numpy(), _formula(values, bits), rtol=1e-6)


@pytest.mark.parametrize("value", (float("inf"), float("nan")))
def test_messages_keep_overflows(value: float) -> None:
    values = torch.ones(300)
    values[270] = value
    for bits in (4, 8):
        received = decode_blocks(encode_blocks(values, bits), bits, 300)
        assert torch.isfinite(received[:BLOCK]).all() and not torch.isfinite(received[BLOCK:]).any()


def _engine(stage: int, kind: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    config = {"micro_batch_size": 2, "global_batch_size": 4, "zero_stage": stage, "grad_compression": kind, "lr": 1e-3}
    return megatron_core.initialize(model, {**config, "clip_grad": 0.0, **settings}).engine


def _step(engine: Any, number: int) -> float:
    generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
    x = torch.randn(2, WIDTH, generator=generator)
    loss = (engine(x) - x.roll(1, 1)).square().mean()
    engine.backward(loss)
    return float(loss.detach())


def _sums(stage: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Gradients of this rank alone, their sum, and this rank's share of it in each bucket."""
    engine = _engine(stage, "int4-gradients")
    _step(engine, 0)
    local = [bucket.grads.clone() for bucket in engine.data_parallel.buckets]
    engine.before_update = lambda: shares.extend(b.grad_shard.clone() for b in engine.data_parallel.buckets)
    shares: list[torch.Tensor] = []
    engine.step()
    places = [(bucket.shard.start, bucket.shard.stop) for bucket in engine.data_parallel.buckets]
    return [flat.tolist() for flat in local], places, [flat.tolist() for flat in shares]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_sums_are_those_of_rounded_gradients(stage: int) -> None:
    ranks = run_ranks(2, _sums, stage)
    for number in range(len(ranks[0][0])):
        local = [torch.tensor(rank[0][number]) for rank in ranks]
        half = len(local[0]) // 2
        # Each share is rounded by its sender, and without ZeRO its sum once more, in 8 bits.
        expected = sum(np.concatenate([_formula(part, 4) for part in flat.split(half)]) for flat in local)
        if stage == 0:
            expected = np.concatenate([_formula(torch.tensor(part), 8) for part in np.split(expected, 2)])
        exact = sum(flat.double().numpy() for flat in local)
        for _, places, shares in ranks:
            start, stop = places[number]
            np.testing.assert_allclose(shares[number], expected[start:stop], rtol=1e-5, atol=1e-9)
            error = np.linalg.norm(shares[number] - exact[start:stop]) / np.linalg.norm(exact[start:stop])
            assert 0.01 < error < 0.2  # 4 bits


def _gathered(kind: str) -> tuple[list[Any], list[Any], list[int], list[int]]:
    engine = _engine(3, kind)
    exact = {name: tensor.clone() for name, tensor in engine.full_state_dict().items()}
    seen: list[torch.Tensor] = []

    @torch.no_grad()
    def note(module: nn.Module, *_: Any) -> None:
        seen.append(module.weight.clone())

    for layer in engine.module:
        layer.register_forward_hook(note)
    _step(engine, 0)
    engine.step()
    buckets = engine.data_parallel.buckets
    weights = [exact[f"{number}.weight"].tolist() for number in range(3)]
    bytes_of = [[b.gathered_bytes for b in buckets], [b.wire_bytes for b in buckets]]
    return weights, [weight.tolist() for weight in seen[:3]], *bytes_of


def test_gathered_weights_are_rounded_and_messages_short() -> None:
    plain = run_ranks(2, _gathered, "none")
    rounded = run_ranks(2, _gathered, "int4-gradients-int8-weights")
    for exact, seen, gathers, sums in rounded:
        for weight, used in zip(exact, seen, strict=True):
            error = np.abs(np.array(used) - np.array(weight)).max()
            assert 0 < error <= 1.01 * np.abs(weight).max() / 127  # at most one step, half of one below the maximum
        assert seen == rounded[0][1]  # equal bits on all ranks
        # 8 and 4 bits in place of 32, and 4 bytes for 256 numbers.
        assert 0.25 < sum(gathers) / sum(plain[0][2]) < 0.3
        assert 0.125 < sum(sums) / sum(plain[0][3]) < 0.16


def test_training_with_short_messages() -> None:
    losses = {kind: run_ranks(2, _train, kind)[0] for kind in ("none", "int4-gradients-int8-weights")}
    assert losses["none"][-1] < 0.7 * losses["none"][0]
    np.testing.assert_allclose(losses["int4-gradients-int8-weights"], losses["none"], rtol=0.05)
    assert losses["int4-gradients-int8-weights"] != losses["none"]


def _train(kind: str) -> list[float]:
    engine = _engine(3, kind, lr=1e-2)
    losses = []
    for number in range(30):
        losses.append(_step(engine, number))
        engine.step()
    return losses


def test_a_lost_sign_is_found() -> None:
    with planted("features.compression.blocks:decode_blocks", ".view(torch.int8) >> 4", " >> 4"):
        values = torch.randn(256)
        assert not np.allclose(decode_blocks(encode_blocks(values, 4), 4, 256).numpy(), _formula(values, 4), rtol=1e-3)


def test_weights_need_zero_3() -> None:
    with pytest.raises(ConfigError, match=r"int8-weights rounds the weights that ZeRO stage 3 gathers"):
        _engine(2, "int8-weights")
