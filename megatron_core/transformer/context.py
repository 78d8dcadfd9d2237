"""What layers are built from, and what they need to know about the micro-batch that passes through them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import DataError, LayoutError
from megatron_core.parallel.groups import WHOLE_SEQUENCES, ContextGroups, Group, ParallelGroups
from megatron_core.parallel.initialization import Normal
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.tensor_parallel import ColumnParallelLinear, KeyedDropout, ModelParallelConfig, RowParallelLinear
from megatron_core.transformer.auxiliary_loss import MicroBatchAuxiliaryLosses, Unit
from megatron_core.transformer.router_replay import RouterReplay


@dataclass(frozen=True)
class LayerContext:
    """What all layers of a model are built from: its configuration, how its layers are split and communicate, and the
    seed of weights and dropout."""

    config: ModelConfig
    parallel: ModelParallelConfig
    tp_group: Group
    seed: int
    groups: ParallelGroups = field(default_factory=ParallelGroups.single)
    """All groups of this rank, for layers that are split over other axes, too."""
    cp: ContextGroups = WHOLE_SEQUENCES
    """The ranks over which sequences are split."""

    @property
    def sequence_parallel(self) -> bool:
        """Whether each tensor-parallel rank has a part of the sequence outside the matrix products."""
        return self.parallel.sequence_parallel

    @property
    def split(self) -> SequenceSplit:
        """How sequences are cut."""
        tp, cp = self.tp_group, self.cp.whole
        return SequenceSplit(tp.rank(), tp.size(), self.sequence_parallel, cp.rank(), cp.size())

    def of_layer(self, layer_number: int) -> LayerContext:
        """The context of a layer: without FP8 if the layer is not one of those that use it."""
        precision = self.parallel.fp8_precision
        if precision is None or layer_number in precision.layers:
            return self
        return replace(self, parallel=replace(self.parallel, fp8_precision=None))

    @property
    def init_method(self) -> Normal:
        """N(0, std): matrices inside a layer, and an output layer that is not tied."""
        return Normal(self.config.hidden_init_std)

    @property
    def embedding_init_method(self) -> Normal:
        """N(0, std): embeddings, and what is tied to them."""
        return Normal(self.config.embedding_init_method_std or self.config.init_method_std)

    @property
    def output_layer_init_method(self) -> Normal:
        """N(0, std / sqrt(2 L)): matrices that write the residual stream, so that its variance does not grow with depth
        (Radford et al. 2019, section 2.3)."""
        return Normal(self.config.hidden_init_std / math.sqrt(2.0 * self.config.num_layers))

    def column_linear(self, input_size: int, output_size: int, **settings: Any) -> ColumnParallelLinear:
        """A matrix inside a layer that is split by its rows."""
        own: dict[str, Any] = {"config": self.parallel, "init_method": self.init_method, "tp_group": self.tp_group}
        return ColumnParallelLinear(input_size, output_size, **own, **settings)

    def output_linear(self, input_size: int) -> RowParallelLinear:
        """A matrix that writes the residual stream; the sum with it adds the bias."""
        return RowParallelLinear(
            input_size,
            self.config.hidden_size,
            config=self.parallel,
            init_method=self.output_layer_init_method,
            bias=self.config.add_bias_linear,
            skip_bias_add=True,
            tp_group=self.tp_group,
        )

    def dropout(self, p: float, name: str) -> KeyedDropout:
        """The dropout at a named point of the model."""
        return KeyedDropout(p, self.seed, name, self.config.kernel_backend)


class KeyValueStore(Protocol):
    """Keys and values of earlier positions, for generation."""

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store ``[s, b, ...]`` of the new positions and return those of all positions so far; of new sequences packed
        into one row the same tensors."""
        ...

    def masked(self, window: int | None) -> Tensor | None:
        """``[b, 1, s, t]``, True where a query must not see a key, its window included; None: the last query's own key
        is the last one in every sequence."""
        ...

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """``masked`` as a term of the scores, -inf where it is True and 0 elsewhere."""
        ...


@dataclass(frozen=True)
class PackedDocuments:
    """Where the documents of each sequence lie; no token sees another document than its own.

    The lengths are known on the host, so that the attention of one document after the other waits for no device.
    """

    lengths: tuple[tuple[int, ...], ...]
    """Of each sequence its documents' lengths in tokens, in their order."""
    device: torch.device
    """Where ``masked`` is made."""

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], batch: int, length: int, device: torch.device) -> PackedDocuments:
        """The documents of ``batch`` sequences of ``length`` tokens; DataError where they do not fill them."""
        if len(lengths) != batch:
            raise DataError(f"document_lengths are those of {len(lengths)} sequences, and the batch has {batch}")
        for number, own in enumerate(lengths):
            if sum(own) != length or min(own, default=0) < 1:
                raise DataError(f"document_lengths[{number}]={list(own)} must be above 0 and add up to {length} tokens")
        return cls(tuple(tuple(own) for own in lengths), device)

    @cached_property
    def masked(self) -> Tensor:
        """``[b, 1, s, s]``, False where a query sees a key: in its own document, at its own position or before it.

        Made at the first use and kept, once for all layers of the micro-batch.
        """
        blocks = [torch.block_diag(*(torch.ones(n, n, dtype=torch.bool) for n in own)) for own in self.lengths]
        return ~torch.stack(blocks).tril().unsqueeze(1).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class SequenceContext:
    """Positions, mask and identity of the sequences in a micro-batch."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and sine of the rotary positions, ``[s, b, r/2]``, or ``[s, 1, r/2]`` where all sequences have the
    same."""
    rotary_of_windows: tuple[Tensor, Tensor] | None = None
    """The same for layers with a window, where these have another base."""
    attention_mask: Tensor | None = None
    """``[b, 1, s, s]``, True where a query must not see a key; None: causal."""
    documents: PackedDocuments | None = None
    """The documents of each sequence, which see nothing of one another; None: each sequence is one document."""
    sample_index: Tensor | None = None
    """``[b]``, the global number of each sequence, which keys its dropout."""
    positions: Tensor | None = None
    """``[s]``, where the tokens that attention sees stand in their whole sequences; None: 0, 1, 2, ..."""
    residual_positions: Tensor | None = None
    """The same for the tokens that this rank holds outside the matrix products."""
    token_mask: Tensor | None = None
    """``[s, b]`` of the tokens that this rank holds outside the matrix products: 1 where a token counts in auxiliary
    losses and statistics, 0 for padding; None: all count."""
    cache: KeyValueStore | None = None
    """Where keys and values of earlier positions are, in generation."""
    router_replay: RouterReplay | None = None
    """What records the choices of routers, or repeats recorded ones."""
    auxiliary_losses: MicroBatchAuxiliaryLosses | None = None
    """What collects the losses that layers add; None: there is no training step that they could count in."""

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
        """``hidden`` unchanged, whose backward also gives the loss ``value`` its gradient; use what is returned.

        ``value`` is a scalar in float32 or wider: a sum over this rank's ``per``, tokens or sequences. The model is
        trained on ``coefficient`` times its mean over the global batch. ``partial``: each tensor-parallel rank has the
        value of its own part of the tokens (sequence parallelism); else all of them have the same.
        Errors: LayoutError for a name that no ``LayerSpec`` has, and with gradients but without a collector.
        """
        if self.auxiliary_losses is not None:
            return self.auxiliary_losses.add(hidden, name, value, layer_number, coefficient, per, partial)
        if torch.is_grad_enabled():
            raise LayoutError(
                f"layer {layer_number} adds the auxiliary loss {name!r}, which would be lost; pass auxiliary_losses= "
                "to the model's forward, or run it under torch.no_grad()"
            )
        return hidden
