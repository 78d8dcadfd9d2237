"""A layer, and the run of layers on one pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_core.tensor_parallel import KeyedDropout
from megatron_core.transformer.attention import SelfAttention
from megatron_core.transformer.blueprint import Blueprint
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.mlp import MLP
from megatron_core.transformer.norm import Norm
from megatron_core.transformer.recompute import recompute_runs, recomputed


class TransformerLayer(nn.Module):
    """Pre-norm layer: x += drop(attention(norm(x))); x += drop(mlp(norm(x))) (Radford et al. 2019, section 2.3).

    ``layer`` is the global number of the layer from 0, whatever stage it is on.
    """

    def __init__(self, blueprint: Blueprint, layer: int) -> None:
        super().__init__()
        self.tp_group, self.sequence_parallel = blueprint.tp_group, blueprint.sequence_parallel
        size, p = blueprint.config.hidden_size, blueprint.config.hidden_dropout
        self.input_layernorm = Norm(blueprint, size, partial_grad=self.sequence_parallel)
        self.self_attention = SelfAttention(blueprint, layer)
        self.attention_dropout = blueprint.dropout(p, f"layers.{layer}.attention")
        self.pre_mlp_layernorm = Norm(blueprint, size, partial_grad=self.sequence_parallel)
        self.mlp = MLP(blueprint)
        self.mlp_dropout = blueprint.dropout(p, f"layers.{layer}.mlp")

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallel) -> the same shape."""
        attended = self.self_attention(self.input_layernorm(hidden), context)
        hidden = hidden + self._drop(self.attention_dropout, attended, context)
        return hidden + self._drop(self.mlp_dropout, self.mlp(self.pre_mlp_layernorm(hidden)), context)

    def _drop(self, dropout: KeyedDropout, x: Tensor, context: SequenceContext) -> Tensor:
        if not dropout.active:
            return x
        first = self.tp_group.rank() * x.shape[0] if self.sequence_parallel else 0
        return dropout(x, hidden_coordinates(x, context.sample_index, first))


def hidden_coordinates(x: Tensor, sample_index: Tensor | None, first_position: int) -> tuple[Tensor | None, ...]:
    """Sample, position and channel of each element of ``x`` ``[s, b, h]`` whose first row is ``first_position``."""
    length, _, channels = x.shape
    positions = torch.arange(first_position, first_position + length, device=x.device)
    samples = None if sample_index is None else sample_index[None, :, None]
    return samples, positions[:, None, None], torch.arange(channels, device=x.device)


class TransformerBlock(nn.Module):
    """The layers of one stage, by their global numbers, and behind the last one the final norm."""

    def __init__(self, blueprint: Blueprint, layers: Sequence[int], *, final_norm: bool) -> None:
        super().__init__()
        self.config = blueprint.config
        self.layers = nn.ModuleDict({str(layer): TransformerLayer(blueprint, layer) for layer in layers})
        self.final_layernorm = None
        if final_norm:
            size = blueprint.config.hidden_size
            self.final_layernorm = Norm(blueprint, size, partial_grad=blueprint.sequence_parallel)

    def forward(self, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Run the stage's layers, recomputing what ``recompute_granularity`` says."""
        layers = list(self.layers.values())
        if not layers and self.final_layernorm is None:
            return hidden.clone()  # were the output the input itself, whoever frees the one would free the other
        for run, recompute in recompute_runs(self.config, len(layers)):

            def through(x: Tensor, run: range = run) -> Tensor:
                for i in run:
                    x = layers[i](x, context)
                return x

            hidden = recomputed(through)(hidden) if recompute and self.training else through(hidden)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)
