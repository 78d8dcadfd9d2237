"""The feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.parallel.sharding import split_fused
from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_core.transformer.blueprint import Blueprint

Activation = Callable[[Tensor], Tensor]


class MLP(nn.Module):
    """x -> W_2 f(W_1 x); gated: W_2 (f(W_g x) * W_u x) with W_g and W_u stacked in one matrix (Shazeer 2020).

    ``[s, b, h]`` -> ``[s, b, h]``; each rank has ffn/tp of the inner features, of gate and value alike.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        config, parallel, tp_group = blueprint.config, blueprint.parallel, blueprint.tp_group
        ffn, size, index = config.ffn_size, tp_group.size(), tp_group.rank()
        pieces = (ffn, ffn) if config.gated_linear_unit else (ffn,)
        self.activation = activation_function(config)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            sum(pieces),
            config=parallel,
            init_method=blueprint.draw_inner,
            bias=config.add_bias_linear,
            tp_group=tp_group,
            spec=partial(split_fused, pieces=pieces, index=index, size=size),
        )
        self.linear_fc2 = RowParallelLinear(
            ffn,
            config.hidden_size,
            config=parallel,
            init_method=blueprint.draw_output,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            tp_group=tp_group,
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the MLP, and leave its last bias, if it has one, to be added: -> (output, bias)."""
        inner, _ = self.linear_fc1(hidden)
        return self.linear_fc2(self.activation(inner))


def activation_function(config: ModelConfig) -> Activation:
    """The MLP's non-linearity; the gated ones halve the last dim."""
    if config.swiglu:
        return partial(_gated, nn.functional.silu)
    if config.geglu:
        return partial(_gated, nn.functional.gelu)
    if config.squared_relu:
        return lambda x: torch.relu(x).square()
    if config.openai_gelu:
        return partial(nn.functional.gelu, approximate="tanh")
    return nn.functional.gelu


def _gated(gate_function: Activation, x: Tensor) -> Tensor:
    gate, value = x.chunk(2, dim=-1)
    return gate_function(gate) * value
