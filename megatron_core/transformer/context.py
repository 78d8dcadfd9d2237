"""Settings and groups for the constructors of layers, and micro-batch data for their forward pass."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import DataError, LayoutError
from megatron_core.ops.rows import copied_to
from megatron_core.parallel.groups import WHOLE_SEQUENCES, ContextGroups, Group, ParallelGroups
from megatron_core.parallel.initialization import Normal
from megatron_core.parallel.micro_batch import SequenceSplit, to_device
from megatron_core.tensor_parallel import ColumnParallelLinear, KeyedDropout, ModelParallelConfig, RowParallelLinear
from megatron_core.tensor_parallel.layers import vocabulary_per_rank
from megatron_core.transformer.auxiliary_loss import MicroBatchAuxiliaryLosses, Unit


@dataclass(frozen=True)
# Everything that a constructor needs in one object: a new setting does not change the signature of every layer, and no
# layer reads global state.
class LayerContext:
    """Constructor input of all layers of a model: configuration, parallel settings, groups, and seed.

    The seed determines weights and dropout.
    """

    config: ModelConfig
    parallel: ModelParallelConfig
    tp_group: Group
    seed: int
    groups: ParallelGroups = field(default_factory=ParallelGroups.single)
    """All groups of this rank, for layers that are also split over other axes."""
    cp: ContextGroups = WHOLE_SEQUENCES
    """The ranks over which sequences are split."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether the sequence is split over the tensor-parallel ranks outside the matrix products."""
        return self.parallel.sequence_parallel

    @property
    def split(self) -> SequenceSplit:
        """The split of sequences over tensor-parallel and context-parallel ranks."""
        tp = self.tp_group
        cp = self.cp.whole
        return SequenceSplit(tp.rank(), tp.size(), self.sequence_parallel, cp.rank(), cp.size())

    def vocabulary_per_rank(self, vocab_size: int) -> int:
        """Rows of the padded vocabulary per rank; with canonical parts those of as many ranks as there are parts."""
        # Each canonical part pads its own rows, so that the padded vocabulary has the same parts in every layout.
        number = self.parallel.arithmetic.parts_on(self.tp_group)
        return vocabulary_per_rank(vocab_size, self.config.make_vocab_size_divisible_by * number, self.tp_group.size())

    def of_layer(self, layer_number: int) -> "LayerContext":
        """Return the context of a layer, with its sizes and its arithmetic."""
        return replace(self.with_arithmetic_of(layer_number), config=self.config.of_layer(layer_number))

    def with_arithmetic_of(self, layer_number: int) -> "LayerContext":
        """Return the context with the arithmetic of a layer."""
        arithmetic = self.parallel.arithmetic.of_layer(layer_number)
        return replace(self, parallel=replace(self.parallel, arithmetic=arithmetic))

    @property
    def init_method(self) -> Normal:
        """N(0, std) for matrices inside a layer and for an untied output layer."""
        return Normal(self.config.hidden_init_std)

    @property
    def embedding_init_method(self) -> Normal:
        """N(0, std) for embeddings and weights tied to them."""
        return Normal(self.config.embedding_init_method_std or self.config.init_method_std)

    @property
    def output_layer_init_method(self) -> Normal:
        """N(0, std / sqrt(2 L)) for matrices whose output is added to the residual stream.

        With a pattern of layers, L layers have L of them instead of 2 L. The scale keeps the variance of the residual
        stream independent of depth (Radford et al. 2019, section 2.3).
        """
        # Attention and MLP of each layer add to the residual stream.
        added = self.config.num_layers * self.config.parts_per_layer
        return Normal(self.config.hidden_init_std / math.sqrt(added))

    def column_linear(self, input_size: int, output_size: int, **settings: Any) -> ColumnParallelLinear:
        """Construct a column-parallel linear layer: the rows of its weight are split over ranks."""
        common: dict[str, Any] = {"config": self.parallel, "init_method": self.init_method, "tp_group": self.tp_group}
        return ColumnParallelLinear(input_size, output_size, **common, **settings)

    def output_linear(self, input_size: int, *, bias: bool | None = None) -> RowParallelLinear:
        """Construct the linear layer before a residual addition, which also adds the bias, if there is one."""
        return RowParallelLinear(
            input_size,
            self.config.hidden_size,
            config=self.parallel,
            init_method=self.output_layer_init_method,
            bias=self.config.add_bias_linear if bias is None else bias,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def dropout(self, p: float, name: str) -> KeyedDropout:
        """Construct the dropout for a named point of the model."""
        return KeyedDropout(p, self.seed, name, self.config.kernel_backend)


class AttentionStep:
    """A change of the scaled queries and of the keys of a layer, constructed with its context and its number."""

    @staticmethod
    def of_positions(config: ModelConfig, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor for all layers of a forward, from positions ``[b, s]`` and the dtype of the weights."""
        raise NotImplementedError

    def __call__(self, query: Tensor, key: Tensor, of_positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return new queries ``[s, b, heads, d]`` and keys ``[s, b, groups, d]`` of this rank's heads."""
        raise NotImplementedError


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of each sequence; a token attends only to tokens of its own document.

    The lengths are on the host, so that attention by documents does not wait for the device.
    """

    lengths: tuple[tuple[int, ...], ...]
    """For each sequence, the lengths of its documents in tokens, in order."""
    device: torch.device
    """Device of ``masked``."""
    masks: dict[int | None, Any] = field(default_factory=dict, compare=False, repr=False)
    """The masks of FlexAttention by window, for all layers of the micro-batch."""

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], batch: int, length: int, device: torch.device) -> "PackedDocuments":
        """Construct from ``batch`` sequences of ``length`` tokens; DataError if document lengths do not add up."""
        if len(lengths) != batch:
            raise DataError(f"document_lengths are those of {len(lengths)} sequences, and the batch has {batch}")
        for number, row in enumerate(lengths):
            if sum(row) != length or min(row, default=0) < 1:
                raise DataError(f"document_lengths[{number}]={list(row)} must be above 0 and add up to {length} tokens")
        return cls(tuple(tuple(row) for row in lengths), device)

    def cut(self, size: int) -> "PackedDocuments":
        """The same documents, each cut into chunks of ``size`` tokens; its last chunk may be shorter."""
        return PackedDocuments(tuple(chunk_lengths(row, size) for row in self.lengths), self.device)

    @cached_property
    def starts(self) -> Tensor:
        """``[documents + 1]`` int32: the first token of each document in all sequences, one after another, and the end.

        Computed at the first use, as ``masked``.
        """
        lengths = [length for row in self.lengths for length in row]
        # int32, as variable-length attention requires.
        return copied_to(accumulate(lengths, initial=0), torch.int32, self.device)

    @cached_property
    def ages(self) -> Tensor:
        """``[b, s]`` int64: the number of tokens of its document before each token.

        Computed at the first use, as ``masked``.
        """
        ages = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in self.lengths])
        return to_device(ages, self.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(length for row in self.lengths for length in row)

    @cached_property
    def masked(self) -> Tensor:
        """``[b, 1, s, s]``, False where a query attends to a key: in its document, at its own or an earlier position.

        Computed at the first use and cached for all layers of the micro-batch.
        """
        blocks = [torch.block_diag(*(torch.ones(n, n, dtype=torch.bool) for n in row)) for row in self.lengths]
        return ~to_device(torch.stack(blocks).tril().unsqueeze(1), self.device)


def cut_documents(
    documents: PackedDocuments | None, size: int | None, batch: int, length: int, device: torch.device, *, masked: bool
) -> PackedDocuments | None:
    """Cut the documents of ``batch`` sequences of ``length`` tokens into chunks of ``size`` tokens; None: no chunks.

    The result is ``documents`` if none is longer than a chunk. ``masked``: whether there is an attention mask.
    Errors: LayoutError for a mask of sequences with several chunks.
    """
    # The usual case of short texts has no chunks, and keeps the causal kernels.
    if size is None or (length if documents is None else documents.longest) <= size:
        return documents
    if masked:
        raise LayoutError(
            f"attention_chunk_size={size} cannot be used with an attention mask for {length} tokens; give "
            "document_lengths instead"
        )
    return (documents or PackedDocuments.of([[length]] * batch, batch, length, device)).cut(size)


def chunk_lengths(lengths: Iterable[int], size: int) -> tuple[int, ...]:
    """The lengths of the chunks of ``size`` tokens of documents with these lengths."""
    return tuple(min(size, length - start) for length in lengths for start in range(0, length, size))


@dataclass(frozen=True)
class ForwardState:
    """Objects that the layers read and write in a forward."""

    cache: Any = None
    """Cache of keys and values of earlier positions, in generation: ``inference.kv_cache.KVCache``; None: no cache."""
    router_replay: Any = None
    """Recorder, or replay, of the experts chosen by routers: ``features.experts.replay.RouterReplay``; None: no replay.
    """
    auxiliary_losses: MicroBatchAuxiliaryLosses | None = None
    """Collector of the losses added by layers; None: outside of a training step."""
    once: dict[str, int] = field(default_factory=dict, compare=False)
    """Numbers that the layers of a forward compute once."""


@dataclass(frozen=True)
class SequenceContext(ForwardState):
    """Positions, mask and identity of the sequences in a micro-batch."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Rotary cosine and sine, ``[s, b, r/2]``, or ``[s, 1, r/2]`` if all sequences have the same positions."""
    rotary_of_windows: tuple[Tensor, Tensor] | None = None
    """The same for layers with a window, if these have a different rotary base."""
    attention_mask: Tensor | None = None
    """``[b, 1, s, s]``, True where a query must not attend to a key; None: causal."""
    documents: PackedDocuments | None = None
    """The documents of each sequence; no attention between documents. None: each sequence is one document."""
    chunks: PackedDocuments | None = None
    """The chunks of each sequence, for layers that attend within chunks; None: each document is one chunk."""
    for_steps: tuple[Tensor, ...] = ()
    """A tensor for each of ``ModelConfig.attention_steps``, ``AttentionStep.of_positions``."""
    sample_index: Tensor | None = None
    """``[b]``, the global number of each sequence; dropout depends on it."""
    positions: Tensor | None = None
    """``[s]``, positions of the attention input tokens in their whole sequences; None: 0, 1, 2, ..."""
    residual_positions: Tensor | None = None
    """Positions of the tokens on this rank outside the matrix products."""
    token_mask: Tensor | None = None
    """``[s, b]`` for the tokens on this rank outside the matrix products; None: all ones.

    1: the token counts in auxiliary losses and statistics; 0: padding.
    """
    sharing_ranks: int | None = None
    """As ``SequenceDetails.sharing_ranks``."""
    repeat: int = 0
    """Number of earlier applications of the current layer to these sequences (``mtp_use_repeated_layer``)."""

    def add_auxiliary_loss(
        self,
        hidden: Tensor,
        name: str,
        value: Tensor,
        *,
        layer_number: int,
        coefficient: float = 1.0,
        per: Unit = "tokens",
        partial: bool = False,
    ) -> Tensor:
        """Return ``hidden``, unchanged; its backward also backpropagates the loss ``value``. Use the returned tensor.

        ``value`` is a scalar in float32 or wider: a sum over this rank's units ``per``, such as tokens or sequences.
        The training loss includes ``coefficient`` times its mean over the global batch. ``partial``: each
        tensor-parallel rank has the value for its own part of the tokens (sequence parallelism); otherwise these ranks
        have the same value.
        Errors: LayoutError for a name in no ``LayerSpec``, and if gradients are enabled without a collector.
        """
        if self.auxiliary_losses is not None:
            number = layer_number + self.repeat  # each application has a value of its own
            return self.auxiliary_losses.add(hidden, name, value, number, coefficient, per, partial)
        # Losing the loss silently would train a model without it.
        if torch.is_grad_enabled():
            raise LayoutError(
                f"layer {layer_number} adds the auxiliary loss {name!r}, which would be lost; pass "
                "ForwardState(auxiliary_losses=...) to the model's forward, or run it under torch.no_grad()"
            )
        return hidden
