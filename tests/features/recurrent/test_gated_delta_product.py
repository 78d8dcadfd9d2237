"""Gated delta products against their equations, evaluated token by token with matrices I - b k k^T."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, rms_norm, silu, softplus

from megatron_core.features.recurrent.gated_delta_product import GatedDeltaProduct
from megatron_core.transformer.context import SequenceContext
from tests.features.recurrent.test_recurrent_layers import layer_of

HEADS, GROUPS, STATES, CHANNELS = 6, 2, 5, 4


def _written_out(layer: GatedDeltaProduct, hidden: Tensor, n: int) -> Tensor:
    """The layer of one sequence ``[s, h]``; pieces and names as in Megatron Core's ``GatedDeltaProductMixer``."""
    inner, shared = HEADS * CHANNELS, GROUPS * STATES
    projected = hidden @ layer.in_proj.weight.T
    window = pad(projected[:, : n * inner + (n + 1) * shared].T, (layer.conv1d.width - 1, 0))
    vkq = silu(conv1d(window, layer.conv1d.weight, groups=len(window))).T
    value, key, query = vkq.split([n * inner, n * shared, shared], dim=-1)
    value = value.view(-1, n, HEADS, CHANNELS)
    key, query = key.view(-1, n, GROUPS, STATES), query.view(-1, GROUPS, STATES)
    key, query = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (key, query))
    gate, rate, decay = projected[:, vkq.shape[1] :].split([inner, n * HEADS, HEADS], dim=-1)
    rate = rate.sigmoid().view(-1, n, HEADS)
    factor = (-layer.A_log.exp() * softplus(decay + layer.dt_bias)).exp()
    rows = []
    for t in range(len(hidden)):
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            if t == 0 and head == 0:
                states = [hidden.new_zeros(STATES, CHANNELS)] * HEADS
            state = factor[t, head] * states[head]
            for j in range(n):
                k, b = key[t, j, group], rate[t, j, head]
                state = (torch.eye(STATES) - b * torch.outer(k, k)) @ state + b * torch.outer(k, value[t, j, head])
            states[head] = state
            rows.append(state.T @ query[t, group] / STATES**0.5)
    gated = torch.cat(rows).view(-1, inner) * silu(gate)
    size = inner // GROUPS
    normed = rms_norm(gated.view(-1, GROUPS, size), (size,), eps=layer.epsilon).flatten(1) * layer.norm
    return normed @ layer.out_proj.weight.T


@pytest.mark.parametrize("n", [1, 3])
def test_layer_is_the_equations(n: int) -> None:
    layer = layer_of(
        torch.float64,
        hybrid_layer_pattern="M*",
        mamba_mixer="gated_delta_product",
        gdp_num_householder=n,
        mamba_state_dim=STATES,
        mamba_head_dim=CHANNELS,
        mamba_num_groups=GROUPS,
        mamba_num_heads=HEADS,
    )
    assert isinstance(layer, GatedDeltaProduct)
    hidden = torch.randn(70, 2, 64, dtype=torch.float64, requires_grad=True)
    found = layer(hidden, SequenceContext())[0]
    wanted = torch.stack([_written_out(layer, hidden[:, number], n) for number in range(2)], dim=1)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)
    weights = torch.randn_like(found)
    inputs = [hidden, *layer.parameters()]
    gradients, wanted_gradients = (torch.autograd.grad((x * weights).sum(), inputs) for x in (found, wanted))
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-9, atol=1e-10)
