"""Base class of layers with a recurrence: convolution, states between ranks and in generation, recomputation."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_core.config.mixers import Recurrence
from megatron_core.errors import LayoutError
from megatron_core.features.recurrent.states import StateExchange
from megatron_core.ops.rows import wide
from megatron_core.parallel.sharding import allocate, split, split_fused
from megatron_core.tensor_parallel import ColumnParallelLinear
from megatron_core.transformer.context import KeyValueStore, LayerContext, SequenceContext
from megatron_core.transformer.recompute import recomputed

DECAYS = (1.0, 16.0)
"""Range of initial decay rates, as in Megatron Core."""


def log_of_decay_rates(tensor: Tensor) -> Tensor:
    """Fill with the logarithms of numbers drawn evenly from ``DECAYS``."""
    return tensor.uniform_(*DECAYS).log_()


class Convolution(nn.Module):
    """Depthwise causal convolution: y_t = silu(b + sum over j of w_j x_(t-j)), over the tokens of a document.

    The channels are those of this rank's queries, keys and values; the weight is ``[channels, 1, width]``, as that of
    ``torch.nn.Conv1d``. Without ``silu``, y_t is the sum.
    """

    def __init__(
        self, context: LayerContext, pieces: tuple[int, ...], width: int, *, bias: bool, silu: bool = True
    ) -> None:
        super().__init__()
        rank, size, parallel = context.tp_group.rank(), context.tp_group.size(), context.parallel
        uniform = partial(nn.init.uniform_, a=-1 / math.sqrt(width), b=1 / math.sqrt(width))
        spec = split_fused((sum(pieces), 1, width), pieces, rank, size)
        self.weight = allocate(spec, parallel.params_dtype, parallel.device)
        self.weight.init_method = uniform
        self.bias = None
        if bias:
            spec = split_fused((sum(pieces),), pieces, rank, size)
            self.bias = allocate(spec, parallel.params_dtype, parallel.device)
            self.bias.init_method = uniform
        self.weight.is_vector = self.weight.decays = True  # no matrix, so that Muon does not take it for one
        self.width, self.activation = width, nn.functional.silu if silu else None

    def forward(self, window: Tensor, ages: Tensor | None) -> Tensor:
        """``[b, width - 1 + n, c]``, the earlier tokens first -> ``[b, n, c]``.

        ``ages`` ``[b, n]``: the number of tokens of the same document before each token; None: all have enough.
        """
        if ages is None:
            found = nn.functional.conv1d(window.mT, self.weight, self.bias, groups=window.shape[2]).mT
        else:
            count, taps = ages.shape[1], self.weight[:, 0].unbind(-1)
            found = window.new_zeros(len(window), count, window.shape[2])
            for at, tap in enumerate(taps):
                visible = ages >= self.width - 1 - at
                found = found + (window[:, at : at + count] * tap).masked_fill(~visible.unsqueeze(-1), 0.0)
            found = found if self.bias is None else found + self.bias
        return found if self.activation is None else self.activation(found)


class RecurrentLayer(nn.Module):
    """A layer whose tokens update a state ``[dk, dv]`` of each head: x -> W_o gated(recurrence(convolution(W x))).

    ``[s, b, h]`` -> the same shape (``[s/tp, b, h]`` with sequence parallelism). The heads are split over the
    tensor-parallel ranks; with context parallelism the states are passed between the ranks of ``context.cp``. In
    generation, the cache stores the states and the last inputs of the convolution. A subclass has the recurrence of its
    ``kind``.
    """

    kind: ClassVar[type[Recurrence]]

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        super().__init__()
        config, sizes, ranks = context.config, self.kind(context.config), context.tp_group.size()
        self.layer_number, self.epsilon, self.backend = layer_number, config.norm_epsilon, config.kernel_backend
        self.keys, self.values = sizes.query_head_size, sizes.value_head_size
        self.convolved, self.pieces = sizes.convolved // ranks, [piece // ranks for piece in sizes.pieces]
        self.state_shape = sizes.heads // ranks, self.keys, self.values
        self.conv1d = Convolution(
            context,
            sizes.convolved_pieces,
            config.linear_conv_kernel_dim,
            bias=sizes.convolution_has_bias,
            silu=sizes.convolution_has_silu,
        )
        self.exchange = StateExchange(context.cp.whole)
        self.recompute_core = config.recomputes("core_attn")
        self.out_proj = context.output_linear(sizes.heads * self.values, bias=False)

    def forward(self, hidden: Tensor, context: SequenceContext) -> tuple[Tensor, Tensor | None]:
        """Return (output, None)."""
        mixed = self._projected(hidden)
        if context.cache is not None:
            return self.out_proj(self._mix_with_cache(mixed[:, 0], context.cache)[:, None])
        mix = recomputed(self._mix) if self.recompute_core and self.training else self._mix
        return self.out_proj(mix(mixed, context))

    def _projected(self, hidden: Tensor) -> Tensor:
        """Return this rank's pieces, ``[s, b, c]``."""
        raise NotImplementedError

    def _divided(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Divide this rank's pieces, ``[..., c]``, into the input of the convolution and the others."""
        convolved, rest = mixed.split([self.convolved, mixed.shape[-1] - self.convolved], dim=-1)
        return convolved, rest

    def _recur(self, convolved: Tensor, rest: Tensor, *, by_steps: bool = False, **given: Any) -> tuple[Tensor, Tensor]:
        """Run the recurrence over the convolved pieces and the others, ``[b, n, c]``, at least in float32.

        ``by_steps``: token by token, otherwise in chunks. ``given``: ``state``, ``first`` and ``state_after`` of the
        operation. Returns the outputs ``[b, n, heads, dv]`` and the state after the last token.
        """
        raise NotImplementedError

    def _gated(self, outputs: Tensor, rest: Tensor) -> Tensor:
        """Norm and gate of the outputs; ``[..., heads, dv]`` -> ``[..., heads * dv]``."""
        raise NotImplementedError

    def _mix(self, mixed: Tensor, context: SequenceContext) -> Tensor:
        """Projections ``[s, b, c]`` of whole sequences, or of this rank's parts -> ``[s, b, heads * dv]``."""
        if context.attention_mask is not None:
            raise LayoutError(
                f"an attention mask cannot be used with layers of the kind {self.kind.name}, whose states hold all "
                "earlier tokens; give document_lengths instead"
            )
        exchange, ages = self.exchange, self._ages(mixed, context)
        own = mixed.unflatten(0, (exchange.parts, -1)).transpose(1, 2).flatten(0, 1)  # [parts b, n, c]
        convolved, rest = self._divided(own)
        before = exchange.tokens_before(convolved, self.conv1d.width - 1)
        convolved = self.conv1d(torch.cat([before, convolved], dim=1), ages)

        def recur(convolved: Tensor, rest: Tensor) -> Tensor:
            first, state_after = None if ages is None else ages == 0, None
            if exchange.parts > 1:
                state_after = exchange.state_before
            outputs, _ = self._recur(convolved, rest, first=first, state_after=state_after)
            return self._gated(outputs.to(mixed.dtype), rest)

        # Backward computes the recurrence again: its products of chunks would be 5 to 10 times as large as its inputs.
        outputs = (recomputed(recur) if self.training else recur)(convolved, rest)
        return outputs.unflatten(0, (exchange.parts, -1)).transpose(1, 2).flatten(0, 1)

    def _ages(self, mixed: Tensor, context: SequenceContext) -> Tensor | None:
        """Number of tokens of its document before each token, ``[parts b, n]``; None without documents."""
        if context.documents is None:
            return None
        ages = context.documents.ages
        if context.positions is not None:
            ages = ages[:, context.positions]
        return ages.unflatten(1, (self.exchange.parts, -1)).transpose(0, 1).flatten(0, 1)

    def _mix_with_cache(self, mixed: Tensor, cache: KeyValueStore) -> Tensor:
        """Update the states of the texts of a step with its tokens ``[tokens, c]``; return ``[tokens, heads * dv]``."""
        step, width = cache.step, self.conv1d.width - 1
        shapes = ((width, self.convolved), mixed.dtype), (self.state_shape, wide(mixed.dtype))
        tails, states = cache.states(self.layer_number, *shapes)
        convolved, rest = self._divided(mixed)
        outputs = []

        def advance(first: int, texts: Tensor, count: int, *, begins: Tensor | None) -> None:
            rows = slice(first, first + len(texts) * count)
            before, state = tails[texts], states[texts]
            if begins is not None:
                before = before.masked_fill(begins[:, None, None], 0.0)
                state = state.masked_fill(begins[:, None, None, None], 0.0)
            window = torch.cat([before, convolved[rows].unflatten(0, (-1, count))], dim=1)
            own = rest[rows].unflatten(0, (-1, count))
            output, state = self._recur(self.conv1d(window, None), own, by_steps=count == 1, state=state)
            tails.index_copy_(0, texts, window[:, window.shape[1] - width :])
            states.index_copy_(0, texts, state)
            outputs.append(self._gated(output.to(own.dtype), own).flatten(0, 1))

        singles = len(step.lengths)
        if singles:
            begins = step.lengths == 1 if step.shortest == 1 else None
            advance(0, step.texts[:singles], 1, begins=begins)
        at = singles
        for number, count in enumerate((*(chunk.count for chunk in step.chunks), *step.fresh), start=singles):
            is_fresh = number >= singles + len(step.chunks)
            texts = step.texts[number : number + 1]
            advance(at, texts, count, begins=torch.ones_like(texts, dtype=torch.bool) if is_fresh else None)
            at += count
        return torch.cat(outputs)


def of_heads(context: LayerContext, count: int) -> nn.Parameter:
    """A parameter with ``count`` numbers, of all heads together, which are split over the ranks."""
    spec = split((count,), 0, context.tp_group.rank(), context.tp_group.size())
    return allocate(spec, context.parallel.params_dtype, context.parallel.device)


def fused_linear(context: LayerContext, pieces: tuple[int, ...]) -> ColumnParallelLinear:
    """A projection to several pieces, of each of which every rank has its part."""
    return context.column_linear(
        context.config.hidden_size,
        sum(pieces),
        bias=False,
        spec=lambda shape, index, size: split_fused(shape, pieces, index, size),
    )
