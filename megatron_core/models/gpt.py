"""A GPT, or the stage of one that a pipeline rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_core import parallel_state
from megatron_core.config import ModelConfig
from megatron_core.errors import DataError
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import gather_channels
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import (
    allocate,
    amend_spec,
    initialise_by_name,
    replicated,
    spec_of,
    split,
)
from megatron_core.tensor_parallel import (
    ColumnParallelLinear,
    ModelParallelConfig,
    VocabParallelEmbedding,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron_core.tensor_parallel.layers import vocabulary_per_rank
from megatron_core.transformer import SequenceContext, TransformerBlock
from megatron_core.transformer.blueprint import Blueprint
from megatron_core.transformer.context import KeyValueStore, PackedDocuments
from megatron_core.transformer.rotary import rotary_table

EMBEDDING = "embedding.word_embeddings.weight"
TIED_COPY = "output_layer.weight"


class PositionEmbedding(nn.Module):
    """A table of learned positions ``[max_sequence_length, h]``, whole on every rank."""

    def __init__(self, blueprint: Blueprint, max_sequence_length: int) -> None:
        super().__init__()
        shape = (max_sequence_length, blueprint.config.hidden_size)
        # With sequence parallel a rank looks up the positions of its part of the sequence alone.
        spec = replicated(shape, blueprint.tp_group.rank(), partial_grad=blueprint.sequence_parallel)
        self.weight = allocate(spec, blueprint.parallel.params_dtype, blueprint.parallel.device)
        self.weight.init_method = blueprint.draw_inner

    def forward(self, position_ids: Tensor) -> Tensor:
        """``[...]`` -> ``[..., h]``."""
        return nn.functional.embedding(position_ids, self.weight)


class LanguageModelEmbedding(nn.Module):
    """Token ids ``[b, s]`` -> ``[s, b, h]`` (``[s/tp, b, h]`` with sequence parallel), plus learned positions."""

    def __init__(self, blueprint: Blueprint, vocab_size: int, max_sequence_length: int) -> None:
        super().__init__()
        config, parallel, tp_group = blueprint.config, blueprint.parallel, blueprint.tp_group
        self.tp_group, self.sequence_parallel = tp_group, blueprint.sequence_parallel
        per_rank = vocabulary_per_rank(vocab_size, config.make_vocab_size_divisible_by, tp_group.size())
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            init_method=blueprint.draw_inner,
            reduce_scatter_embeddings=parallel.sequence_parallel,
            config=parallel,
            tp_group=tp_group,
            padded_size=per_rank * tp_group.size(),
        )
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(blueprint, max_sequence_length)
        self.dropout = blueprint.dropout(config.hidden_dropout, "embedding")

    def forward(self, input_ids: Tensor, position_ids: Tensor, sample_index: Tensor | None) -> Tensor:
        """Embed tokens and positions."""
        hidden = self.word_embeddings(input_ids)
        if not self.sequence_parallel:
            hidden = hidden.transpose(0, 1)
        first = self.tp_group.rank() * hidden.shape[0] if self.sequence_parallel else 0
        if self.position_embeddings is not None:
            here = position_ids[:, first : first + hidden.shape[0]].transpose(0, 1)
            hidden = hidden + self.position_embeddings(here)
        if not self.dropout.active:
            return hidden.contiguous()
        return self.dropout(hidden, sample_index, first_position=first)


class GPTModel(nn.Module):
    """A decoder-only language model, or the part of it with the given ``layers``.

    ``pre_process`` adds the embedding before them, ``post_process`` the final norm and the output layer behind them.
    Initial weights depend on ``seed`` and the parameters' global names alone. ``tied_weight`` is the word embedding's,
    for a last stage on the rank that holds the first one, too.
    Source: Radford et al. 2019; Narayanan et al. 2021 for the split over stages.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        max_sequence_length: int,
        *,
        parallel: ModelParallelConfig | None = None,
        layers: Sequence[int] | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        tp_group: Group | None = None,
        seed: int = 1234,
        tied_weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        parallel = parallel or ModelParallelConfig()
        # The weights are drawn below, by name and once; layers that drew their own would do it in vain.
        self.parallel = replace(parallel, perform_initialization=False)
        self.tp_group = tp_group if tp_group is not None else parallel_state.get_tensor_model_parallel_group()
        blueprint = Blueprint(config, self.parallel, self.tp_group, seed)
        self.embedding = LanguageModelEmbedding(blueprint, vocab_size, max_sequence_length) if pre_process else None
        # In a tuple, because a module makes every parameter that it is given its own.
        self._weights_of_others = () if tied_weight is None else (tied_weight,)
        layers = range(config.num_layers) if layers is None else layers
        self.decoder = TransformerBlock(blueprint, layers, final_norm=post_process)
        self.output_layer = self._make_output_layer(blueprint) if post_process else None
        self._input_tensor: Tensor | None = None
        if config.share_embeddings_and_output_weights and pre_process != post_process and tied_weight is None:
            amend_spec(self._shared_weight(), tied=True, is_copy=post_process)
        if parallel.perform_initialization:
            self.initialise(seed)

    def _make_output_layer(self, blueprint: Blueprint) -> ColumnParallelLinear:
        """The output layer; a tied one has no weight of its own on the stage, or on the rank, of the embedding."""
        tied_here = self.config.share_embeddings_and_output_weights and (
            self.embedding is not None or self._weights_of_others != ()
        )
        size, index = self.tp_group.size(), self.tp_group.rank()
        per_rank = vocabulary_per_rank(self.vocab_size, self.config.make_vocab_size_divisible_by, size)
        return ColumnParallelLinear(
            self.config.hidden_size,
            per_rank * size,
            config=self.parallel,
            init_method=blueprint.draw_inner,
            bias=False,
            skip_weight_param_allocation=tied_here,
            tp_group=self.tp_group,
            spec=lambda shape: split((self.vocab_size, *shape[1:]), 0, index, size, padded=shape[0]),
        )

    def _shared_weight(self) -> nn.Parameter | None:
        """The weight that embeds tokens and, when tied, scores them."""
        if self.embedding is not None:
            return self.embedding.word_embeddings.weight
        if self._weights_of_others:
            return self._weights_of_others[0]
        return self.output_layer.weight if self.output_layer is not None else None

    def named_global_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with names that do not depend on the stage; the copy of a tied weight has the original's name."""
        for name, parameter in self.named_parameters():
            yield (EMBEDDING if name == TIED_COPY and spec_of(parameter).is_copy else name), parameter

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """Give the previous stage's output to the next ``forward``, as Megatron's schedules do."""
        self._input_tensor = input_tensor

    def initialise(self, seed: int) -> None:
        """Draw all weights anew."""
        for name, parameter in self.named_global_parameters():
            initialise_by_name(parameter, parameter.init_method, seed, name)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        hidden_states: Tensor | None = None,
        labels: Tensor | None = None,
        sample_index: Tensor | None = None,
        document_lengths: Sequence[Sequence[int]] | None = None,
        cache: KeyValueStore | None = None,
        first_position: int = 0,
    ) -> Tensor:
        """Losses ``[b, s]`` with ``labels``, else logits ``[b, s, vocabulary]``; ``[s, b, h]`` before the last stage.

        ``input_ids``, ``labels`` ``[b, s]``; ``position_ids`` ``[b, s]``, or ``[1, s]`` for the same in every sequence,
        or None for 0, 1, 2, ...; learned and rotary positions follow them. ``hidden_states`` is the previous stage's
        output; ``sample_index`` ``[b]`` keys dropout. ``document_lengths`` has a list for each sequence: documents of
        so many tokens, in this order, see nothing of one another. ``first_position`` is where the sequence begins when
        ``cache`` holds what came before; documents and a cache do not go together.
        """
        if hidden_states is None:
            hidden_states, self._input_tensor = self._input_tensor, None
        if position_ids is None:
            last = first_position + input_ids.shape[1]
            position_ids = torch.arange(first_position, last, device=input_ids.device)[None, :]
        if self.embedding is not None:
            hidden_states = self.embedding(input_ids, position_ids, sample_index)
        context = SequenceContext(
            rotary=self._rotary(position_ids),
            attention_mask=attention_mask,
            documents=self._documents(document_lengths, input_ids, cache),
            sample_index=sample_index,
            cache=cache,
        )
        hidden_states = self.decoder(hidden_states, context)
        if self.output_layer is None:
            return hidden_states
        tied = self._shared_weight() if self.output_layer.weight is None else None
        if labels is not None:
            return self._losses(hidden_states, labels.transpose(0, 1), tied).transpose(0, 1)
        logits, _ = self.output_layer(hidden_states, weight=tied)
        return gather_channels(logits, self.tp_group)[..., : self.vocab_size].transpose(0, 1)

    def _losses(self, hidden_states: Tensor, target: Tensor, tied: nn.Parameter | None) -> Tensor:
        """Final hidden states ``[s, b, h]`` and targets ``[s, b]`` -> losses ``[s, b]``."""
        size, backend = self.vocab_size, self.config.kernel_backend
        if self.config.fuses_output_layer_with_loss:
            weight = self.output_layer.weight if tied is None else tied
            comm = self.output_layer.comm
            return linear_cross_entropy(hidden_states, weight, target, comm, vocab_size=size, backend=backend)
        logits, _ = self.output_layer(hidden_states, weight=tied)
        return vocab_parallel_cross_entropy(
            logits, target, tp_group=self.tp_group, vocab_size=size, overwrite_logits=True, backend=backend
        )

    def _rotary(self, position_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.config.position_embedding_type != "rope":
            return None
        channels = int(self.config.head_size * self.config.rotary_percent)
        return rotary_table(position_ids, channels, self.config.rotary_base, wide(self.parallel.params_dtype))

    def _documents(
        self, lengths: Sequence[Sequence[int]] | None, input_ids: Tensor, cache: KeyValueStore | None
    ) -> PackedDocuments | None:
        if lengths is None:
            return None
        if cache is not None:
            raise DataError("document_lengths say nothing of the positions in a cache; give one of the two")
        return PackedDocuments.of(lengths, *input_ids.shape, input_ids.device)
