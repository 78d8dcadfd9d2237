"""A layer, and the run of layers on one pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

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

    Each += is one pass over x together with the dropout and the bias of the last matrix product before it, or where
    attention's has neither, with the norm behind it.
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
        attended, bias = self.self_attention(self.input_layernorm(hidden), context)
        if bias is None and not self.attention_dropout.active:
            normed, hidden = self.pre_mlp_layernorm(attended, residual=hidden)
        else:
            hidden = self._add(hidden, attended, bias, self.attention_dropout, context)
            normed = self.pre_mlp_layernorm(hidden)
        return self._add(hidden, *self.mlp(normed), self.mlp_dropout, context)

    def _add(
        self, hidden: Tensor, x: Tensor, bias: Tensor | None, dropout: KeyedDropout, context: SequenceContext
    ) -> Tensor:
        first = self.tp_group.rank() * x.shape[0] if self.sequence_parallel else 0
        return dropout(x, context.sample_index, bias=bias, residual=hidden, first_position=first)


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
