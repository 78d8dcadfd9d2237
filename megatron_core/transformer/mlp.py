"""The feed-forward layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.ops.activation import Kind, bias_activation
from megatron_core.ops.backend import serving
from megatron_core.parallel.sharding import split_fused
from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_core.transformer.blueprint import Blueprint


class MLP(nn.Module):
    """x -> W_2 f(W_1 x); gated: W_2 (f(W_g x) * W_u x) with W_g and W_u stacked in one matrix (Shazeer 2020).

    ``[s, b, h]`` -> ``[s, b, h]``; each rank has ffn/tp of the inner features, of gate and value alike.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        config, parallel, tp_group = blueprint.config, blueprint.parallel, blueprint.tp_group
        ffn, size, index = config.ffn_size, tp_group.size(), tp_group.rank()
        pieces = (ffn, ffn) if config.gated_linear_unit else (ffn,)
        self.activation, self.backend = activation_kind(config), config.kernel_backend
        # Where PyTorch's own serves, the bias is added within the matrix product, which costs nothing.
        device_type = torch.device(parallel.device).type
        fused = serving("activation", self.backend, device_type, parallel.params_dtype) == "native"
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            sum(pieces),
            config=parallel,
            init_method=blueprint.draw_inner,
            bias=config.add_bias_linear,
            skip_bias_add=fused,
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
        inner, bias = self.linear_fc1(hidden)
        return self.linear_fc2(bias_activation(inner, bias, self.activation, backend=self.backend))


def activation_kind(config: ModelConfig) -> Kind:
    """The MLP's non-linearity; the gated ones halve the last dim."""
    if config.swiglu:
        return "swiglu"
    if config.geglu:
        return "geglu"
    if config.squared_relu:
        return "squared_relu"
    return "gelu_tanh" if config.openai_gelu else "gelu"
