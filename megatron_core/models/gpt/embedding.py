"""The embedding of a GPT model: word embeddings, learned positions, norm and dropout."""

import torch
from torch import Tensor, nn

from megatron_core.ops.rows import wide
from megatron_core.parallel.sharding import allocate, replicated
from megatron_core.tensor_parallel import VocabParallelEmbedding
from megatron_core.transformer import SequenceContext
from megatron_core.transformer.context import LayerContext
from megatron_core.transformer.norm import norm_of


class PositionEmbedding(nn.Module):
    """Learned position embeddings ``[max_sequence_length, h]``, replicated on all ranks."""

    def __init__(self, context: LayerContext, max_sequence_length: int) -> None:
        super().__init__()
        shape = (max_sequence_length, context.config.hidden_size)
        # With sequence parallelism a rank looks up only the positions of its part of the sequence.
        spec = replicated(shape, context.tp_group.rank(), partial_grad=context.sequence_parallel)
        self.weight = allocate(spec, context.parallel.params_dtype, context.parallel.device)
        self.weight.init_method = context.embedding_init_method
        self.lookup = context.parallel.arithmetic.lookup_positions

    def forward(self, position_ids: Tensor, batch: int) -> Tensor:
        """``[s, b]``, or ``[s, 1]`` for all ``batch`` sequences -> ``[s, b, h]`` or ``[s, 1, h]``."""
        return self.lookup(position_ids, self.weight, batch)


class LanguageModelEmbedding(nn.Module):
    """Token ids ``[b, s]`` -> ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallelism), plus learned positions,
    normalized with ``embedding_layernorm``; the start of the residual stream."""

    def __init__(self, context: LayerContext, vocab_size: int, max_sequence_length: int) -> None:
        super().__init__()
        config = context.config
        parallel = context.parallel
        tp_group = context.tp_group
        self.sequence_parallel = context.sequence_parallel
        per_rank = context.vocabulary_per_rank(vocab_size)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=context.embedding_init_method,
            reduce_scatter_embeddings=parallel.sequence_parallel,
            config=parallel,
            tp_group=tp_group,
            padded_size=per_rank * tp_group.size(),
        )
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(context, max_sequence_length)
        # Rounded to the dtype of the weights, as in the published models.
        root = torch.tensor(config.hidden_size**0.5, dtype=parallel.params_dtype)
        self.scale = root.item() if config.scale_embeddings else None
        self.factor = config.embedding_factor
        self.norm = None
        if config.embedding_layernorm:
            self.norm = norm_of(config)(context, config.hidden_size, partial_grad=context.sequence_parallel)
        self.wide_stream = config.fp32_residual_connection
        self.dropout = context.dropout(config.hidden_dropout, "embedding")

    def forward(self, input_ids: Tensor, position_ids: Tensor, context: SequenceContext) -> Tensor:
        """``position_ids`` ``[b, s]`` or ``[1, s]`` belong to the output: ``s/tp`` with sequence parallelism."""
        hidden = self.word_embeddings(input_ids)
        if self.scale is not None:
            hidden = hidden * self.scale
        if not self.sequence_parallel:
            hidden = hidden.transpose(0, 1)
        if self.position_embeddings is not None:
            hidden = hidden + self.position_embeddings(position_ids.transpose(0, 1), hidden.shape[1])
        if self.factor != 1.0:
            hidden = hidden * self.factor
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.wide_stream:
            hidden = hidden.to(wide(hidden.dtype))
        # The embedding is a transposed view; the first norm and the messages between stages need contiguous memory.
        if not self.dropout.active:
            return hidden.contiguous()
        return self.dropout(hidden, context.sample_index, position_ids=context.residual_positions)
