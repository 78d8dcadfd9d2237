"""``DistributedAttention`` against torch's attention of the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from deepspeed.sequence.layer import DistributedAttention
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks

RANKS = 2
LENGTH, BATCH, HEADS, SIZE, ROTATED = 6, 3, 4, 8, 6
ORDERS = {"sequence first": (0, 1, 2, 3), "batch first": (1, 0, 2, 3)}
"""Dimensions of the inputs, of sequence, batch, heads and channels."""


def _draw() -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Queries, keys, values and gradients of the output ``[s, b, h, d]``; angles as cosines and sines."""
    generator = torch.Generator().manual_seed(3)
    shape = LENGTH, BATCH, HEADS, SIZE
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    angles = torch.arange(LENGTH)[:, None] * 10.0 ** -torch.arange(ROTATED // 2, dtype=torch.float64)
    angles = torch.cat([angles, angles], dim=-1)[None, :, None].expand(BATCH, -1, -1, -1)
    return inputs, (angles.cos(), angles.sin())


def _attention(query: Tensor, key: Tensor, value: Tensor, order: tuple[int, ...], scale: float) -> Tensor:
    """Causal attention of inputs in this order of dimensions."""
    to_torch = [order.index(dimension) for dimension in (1, 2, 0, 3)]  # [b, h, s, d]
    output = scaled_dot_product_attention(
        *(x.permute(to_torch) for x in (query, key, value)), is_causal=True, scale=scale
    )
    return output.permute(torch.tensor(to_torch).argsort().tolist())


def _of_a_rank(order: tuple[int, ...], with_angles: bool) -> list[Tensor]:
    """The rank's parts of the output and of the gradients, ``[s / ranks, b, h, d]``."""
    inputs, angles = _draw()
    *leaves, grad = (x.chunk(RANKS)[dist.get_rank()].permute(order) for x in inputs)
    leaves = [x.contiguous().requires_grad_() for x in leaves]
    layer = DistributedAttention(_attention, dist.group.WORLD, scatter_idx=2, gather_idx=order.index(0))
    output = layer(*leaves, order.index(1), angles if with_angles else None, order, scale=0.3)
    output.backward(grad)
    return [x.permute(order) for x in (output.detach(), *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize(("order", "with_angles"), [(ORDERS["sequence first"], True), (ORDERS["batch first"], False)])
def test_it_equals_attention_of_the_whole_sequence(order: tuple[int, ...], with_angles: bool) -> None:
    (*leaves, grad), (cos, sin) = _draw()
    leaves = [x.requires_grad_() for x in leaves]

    def turn(x: Tensor) -> Tensor:
        """Multiply pairs of channels, as complex numbers, by e^(i angle)."""
        pairs = torch.complex(*x[..., :ROTATED].chunk(2, -1)) * torch.complex(cos, sin)[..., : ROTATED // 2].permute(
            1, 0, 2, 3
        )
        return torch.cat([pairs.real, pairs.imag, x[..., ROTATED:]], dim=-1)

    query, key = (turn(x) if with_angles else x for x in leaves[:2])
    output = _attention(query, key, leaves[2], (0, 1, 2, 3), 0.3)
    output.backward(grad)
    expected = [output.detach(), *(leaf.grad for leaf in leaves)]
    parts = run_ranks(RANKS, _of_a_rank, order, with_angles)
    for whole, shards in zip(expected, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(shards), whole, rtol=0, atol=1e-12)


def _too_many_ranks() -> str:
    layer = DistributedAttention(_attention, dist.group.WORLD)
    x = torch.zeros(1, 1, 3, 2)
    with pytest.raises(ConfigError) as caught:
        layer(x, x, x, 1, None, (0, 1, 2, 3), 1.0)
    return str(caught.value)


def test_heads_that_cannot_be_divided_are_named() -> None:
    for message in run_ranks(RANKS, _too_many_ranks):
        assert "dimension 2 of (1, 1, 3, 2) must be a multiple of the 2 ranks" in message


def test_other_layers_of_the_module_are_refused_when_they_are_built() -> None:
    from deepspeed.sequence.fpdt_layer import FPDT_Attention

    with pytest.raises(ConfigError, match=r"use deepspeed\.sequence\.layer\.DistributedAttention"):
        FPDT_Attention()
