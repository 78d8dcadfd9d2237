"""Multi-token prediction: layers that predict tokens after the next one; used only in training."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError
from megatron_core.features.multi_token.settings import MultiTokenConfig
from megatron_core.ops.reference import uniform
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import (
    gather_channels,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
    scatter_to_sequence,
)
from megatron_core.parallel.initialization import name_seed
from megatron_core.parallel.micro_batch import LaterTokens
from megatron_core.parallel.sharding import allocate, split
from megatron_core.transformer.block import TransformerLayer
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import LayerSpecs, mtp_loss_names
from megatron_core.transformer.norm import norm_of
from megatron_core.transformer.recompute import recomputed


@dataclass
class HiddenStateMixing:
    """The input of each depth: for each token the newest hidden state, or the one of an earlier depth.

    h_j of position i + k - j and h_k of position i predict the same token; depth k + 1 receives one of h_0, ..., h_k,
    drawn uniformly for each token, and h_k if the position is after the end of the document. The draw is a function of
    (seed, depth, sample, position).
    Source: Megatron Core, ``MultiTokenPredictionBlock`` with ``mtp_hsm``, which draws from generators of ranks.
    """

    context: LayerContext
    earlier: list[Tensor] = field(default_factory=list)
    """The hidden states of earlier depths, shifted to the positions of the next depth."""

    def input_of(self, depth: int, newest: Tensor, context: SequenceContext) -> Tensor:
        """Return the input of ``depth`` = 0, 1, ...; ``newest``: the output of the depth before, ``[s, b, h]``."""
        positions = context.residual_positions
        if positions is None or context.sample_index is None:
            raise ConfigError("mtp_hsm=True needs sample_index: pass the batch's global sample numbers to forward")
        self.earlier = [self._next_positions(hidden, positions) for hidden in self.earlier]
        mixed = newest
        key = name_seed(self.context.seed, f"mixing:mtp.{depth}")
        drawn = uniform((*newest.shape[:2], 1), key, context.sample_index, positions)
        drawn = (drawn * (depth + 1)).long()
        for number, hidden in enumerate(self.earlier):
            is_inside = _has_token_ahead(depth - number, positions, self._length(newest), context)
            mixed = torch.where((drawn == number) & is_inside, hidden, mixed)
        self.earlier.append(newest)
        return mixed

    def _length(self, hidden: Tensor) -> int:
        split = self.context.split
        return len(hidden) * split.cp_size * (split.tp_size if split.sequence_parallel else 1)

    def _next_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """``hidden`` ``[s, b, h]`` of the positions after this rank's; any value after the end of the sequence."""
        split = self.context.split
        # This rank's tokens are one or two runs of positions: with context parallelism an early and a late chunk.
        before = split.tp_rank * len(hidden) if split.sequence_parallel else 0
        middle = self._length(hidden) // split.cp_size // 2 - before
        has_two_runs = split.cp_size > 1 and 0 < middle < len(hidden)
        starts = [0, middle if has_two_runs else 0]  # as many on each rank
        firsts, first_positions = hidden[starts], positions[starts]
        for group in (self.context.tp_group,) * split.sequence_parallel + (self.context.cp.whole,):
            firsts, first_positions = (gather_from_sequence(x, group) for x in (firsts, first_positions))
        shifted = hidden.roll(-1, 0)
        ends = sorted({-1, starts[1] - 1})
        sources = (first_positions == positions[ends, None] + 1).int().argmax(dim=1)
        return shifted.index_copy(0, torch.tensor(ends, device=hidden.device) % len(hidden), firsts[sources])


def _has_token_ahead(ahead: int, positions: Tensor, length: int, context: SequenceContext) -> Tensor:
    """``[s, b, 1]`` or ``[s, 1, 1]``: whether the token ``ahead`` positions later is in the same document."""
    later = positions + ahead
    is_inside = (later < length)[:, None]
    if context.documents is not None:
        ages = context.documents.ages[:, later.clamp(max=length - 1)].T
        is_inside = is_inside & (ages >= ahead)
    return is_inside.unsqueeze(-1)


class MultiTokenPredictionLayer(nn.Module):
    """h_k = layer(W_eh [norm(E t_{i+k}); norm(h_{k-1})]) for position i; the output layer is shared.

    The output is normalized before the shared output layer. ``depth`` is k - 1, or 0 of a layer that is applied for
    each k. The layer is constructed like the last layer of the model; its number is num_layers + depth.
    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 2.2; names as in Megatron Core's layer of this name.
    """

    def __init__(self, context: LayerContext, depth: int, layer_specs: LayerSpecs) -> None:
        super().__init__()
        number = context.config.num_layers + depth
        context = context.with_arithmetic_of(number)
        config = context.config
        self.tp_group = context.tp_group
        size = config.hidden_size
        partial_grad = context.sequence_parallel
        norm = norm_of(config)
        self.enorm = norm(context, size, partial_grad=partial_grad)
        self.hnorm = norm(context, size, partial_grad=partial_grad)
        self.eh_proj = context.column_linear(2 * size, size, bias=False)
        self.embedding_dropout = context.dropout(config.hidden_dropout, f"mtp.{depth}.embedding")
        self.mtp_model_layer = TransformerLayer(context, number, layer_specs(config, number))
        self.final_layernorm = norm(context, size, partial_grad=partial_grad)
        self.sequence_parallel = context.sequence_parallel
        self.recompute = config.recompute_granularity == "full"

    def forward(self, embedded: Tensor, hidden: Tensor, context: SequenceContext) -> Tensor:
        """Two tensors ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism) -> normalized h_k, same shape."""
        run = recomputed(self._forward) if self.recompute else self._forward
        return run(embedded, hidden, context)

    def _forward(self, embedded: Tensor, hidden: Tensor, context: SequenceContext) -> Tensor:
        if self.embedding_dropout.active:
            embedded = self.embedding_dropout(embedded, context.sample_index, position_ids=context.residual_positions)
        both = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        joined = gather_channels(self.eh_proj(both)[0], self.tp_group)
        if self.sequence_parallel:
            joined = scatter_to_sequence(joined, self.tp_group)
        return self.final_layernorm(self.mtp_model_layer(joined, context))


class MultiTokenPredictionBlock(nn.Module):
    """The layers that predict 2, 3, ... tokens ahead, each from the output of the previous one; on the last stage.

    They use the model's word embedding. ``own_embedding`` creates the copy ``word_embeddings``, tied to the first
    stage's embedding, for a rank without the first stage.
    """

    def __init__(self, context: LayerContext, vocab_size: int, layer_specs: LayerSpecs, *, own_embedding: bool) -> None:
        super().__init__()
        config = self.model_config = context.config.section(MultiTokenConfig)
        self.tp_group = context.tp_group
        self.new_mixing = partial(HiddenStateMixing, context) if config.mtp_hsm else None
        self.split = context.split
        self.sequence_parallel = context.sequence_parallel
        self.arithmetic = context.parallel.arithmetic
        self.scale = (config.hidden_size**0.5 if config.scale_embeddings else 1.0) * config.embedding_factor
        self.layers = nn.ModuleList(
            MultiTokenPredictionLayer(context, depth, layer_specs) for depth in range(config.distinct_added_layers)
        )
        self.repeats = config.mtp_use_repeated_layer
        self.word_embeddings: nn.Parameter | None = None
        if own_embedding:
            size = self.tp_group.size()
            index = self.tp_group.rank()
            padded = context.vocabulary_per_rank(vocab_size) * size
            spec = split((vocab_size, config.hidden_size), 0, index, size, padded=padded)
            self.word_embeddings = allocate(spec, context.parallel.params_dtype, context.parallel.device)
            self.word_embeddings.init_method = context.embedding_init_method

    def add_losses(
        self,
        losses: Tensor,
        hidden: Tensor,
        labels: Tensor,
        later: LaterTokens,
        weight: nn.Parameter,
        context: SequenceContext,
        losses_of: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return ``losses`` with the gradients of the losses of these layers attached to their backward.

        The loss of each depth is a mean over the unmasked tokens of the global batch at that depth; ``losses_of``
        computes losses ``[s, b]`` from the input of the output layer and targets. ``weight``: the word embedding.
        """
        names = mtp_loss_names(self.model_config)
        tokens = labels
        mixing = None if self.new_mixing is None else self.new_mixing()
        for depth, name in enumerate(names):
            if self.model_config.mtp_zero_last_input:
                length = tokens.shape[1] * self.split.cp_size
                is_last = self.split.positions(length, tokens.device) == length - 1 - depth
                tokens = tokens.masked_fill(is_last, 0)
            if mixing is not None:
                hidden = mixing.input_of(depth, hidden, context)
            hidden = self.predict(depth, tokens, hidden, weight, context)
            tokens = later.labels[depth]
            mask = later.masks[depth].transpose(0, 1)
            of_depth = losses_of(hidden, tokens.transpose(0, 1))
            of_depth = of_depth.to(wide(of_depth.dtype)) * mask
            losses = context.add_auxiliary_loss(
                losses,
                name,
                self.arithmetic.loss_sum(of_depth),
                layer_number=self.model_config.num_layers + depth,
                coefficient=self.model_config.mtp_loss_scaling_factor / len(names),
                per="counted",
            )
        return losses

    def predict(
        self, depth: int, tokens: Tensor, hidden: Tensor, weight: nn.Parameter, context: SequenceContext
    ) -> Tensor:
        """Return h_(depth + 1) from the ``tokens`` ``[b, s]`` at this depth and ``hidden`` = h_depth; see ``embed``."""
        embedded = self.embed(tokens, weight)
        if self.repeats:
            return self.layers[0](embedded, hidden, replace(context, repeat=depth))
        return self.layers[depth](embedded, hidden, context)

    def embed(self, tokens: Tensor, weight: nn.Parameter) -> Tensor:
        """``[b, s]`` -> ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism) by embedding lookup."""
        first = self.tp_group.rank() * weight.shape[0]
        embedded = self.arithmetic.lookup(tokens.transpose(0, 1), weight, first, self.tp_group.size())
        combine = reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_region
        embedded = combine(embedded, self.tp_group)
        return embedded if self.scale == 1.0 else embedded * self.scale
