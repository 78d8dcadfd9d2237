"""Base class of layers with a recurrence: convolution, states between ranks and in generation, recomputation."""

import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron_core.errors import LayoutError
from megatron_core.features.recurrent.kinds import RecurrenceKind
from megatron_core.features.recurrent.states import StateExchange
from megatron_core.ops.rows import wide
from megatron_core.parallel.sharding import allocate, split, split_fused
from megatron_core.tensor_parallel import ColumnParallelLinear
from megatron_core.transformer.context import LayerContext, SequenceContext
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
        rank = context.tp_group.rank()
        size = context.tp_group.size()
        parallel = context.parallel
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
        self.width = width
        self.activation = nn.functional.silu if silu else None

    def forward(self, window: Tensor, ages: Tensor | None) -> Tensor:
        """``[b, width - 1 + n, c]``, the earlier tokens first -> ``[b, n, c]``.

        ``ages`` ``[b, n]``: the number of tokens of the same document before each token; None: all have enough.
        """
        if ages is None:
            output = nn.functional.conv1d(window.mT, self.weight, self.bias, groups=window.shape[2]).mT
        else:
            count = ages.shape[1]
            taps = self.weight[:, 0].unbind(-1)
            output = window.new_zeros(len(window), count, window.shape[2])
            for index, tap in enumerate(taps):
                visible = ages >= self.width - 1 - index
                output = output + (window[:, index : index + count] * tap).masked_fill(~visible.unsqueeze(-1), 0.0)
            output = output if self.bias is None else output + self.bias
        return output if self.activation is None else self.activation(output)


class RecurrentLayer(nn.Module):
    """A layer whose tokens update a state ``[dk, dv]`` of each head: x -> W_o gated(recurrence(convolution(W x))).

    ``[s, b, h]`` -> the same shape (``[s/tp, b, h]`` with sequence parallelism). The heads are split over the
    tensor-parallel ranks; with context parallelism the states are passed between the ranks of ``context.cp``. In
    generation, the cache stores the states and the last inputs of the convolution. A subclass has the recurrence of its
    ``recurrence``.
    """

    recurrence: ClassVar[type[RecurrenceKind]]
    in_proj: nn.Module

    def __init__(self, context: LayerContext, layer_number: int) -> None:
        super().__init__()
        config = context.config
        sizes = self.recurrence(context.config)
        ranks = context.tp_group.size()
        self.layer_number = layer_number
        self.epsilon = config.norm_epsilon
        self.backend = config.kernel_backend
        self.keys = sizes.query_head_size
        self.values = sizes.value_head_size
        self.convolved = sizes.convolved // ranks
        self.pieces = [piece // ranks for piece in sizes.pieces]
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
        mixed, _ = self.in_proj(hidden)
        return mixed

    def _divided(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Divide this rank's pieces, ``[..., c]``, into the input of the convolution and the others."""
        convolved, gates = mixed.split([self.convolved, mixed.shape[-1] - self.convolved], dim=-1)
        return convolved, gates

    def _recur(
        self, convolved: Tensor, gates: Tensor, *, by_steps: bool = False, **extra: Any
    ) -> tuple[Tensor, Tensor]:
        """Run the recurrence over the convolved pieces and the others, ``[b, n, c]``, at least in float32.

        ``by_steps``: token by token, otherwise in chunks. ``extra``: ``state``, ``first`` and ``state_after`` of the
        operation. Returns the outputs ``[b, n, heads, dv]`` and the state after the last token.
        """
        raise NotImplementedError

    def _gated(self, outputs: Tensor, gates: Tensor) -> Tensor:
        """Norm and gate of the outputs; ``[..., heads, dv]`` -> ``[..., heads * dv]``."""
        raise NotImplementedError

    def _mix(self, mixed: Tensor, context: SequenceContext) -> Tensor:
        """Projections ``[s, b, c]`` of whole sequences, or of this rank's parts -> ``[s, b, heads * dv]``."""
        if context.attention_mask is not None:
            raise LayoutError(
                f"an attention mask cannot be used with layers of the kind {self.recurrence.name}, whose states hold "
                "all earlier tokens; give document_lengths instead"
            )
        exchange = self.exchange
        ages = self._ages(mixed, context)
        sequences = mixed.unflatten(0, (exchange.parts, -1)).transpose(1, 2).flatten(0, 1)  # [parts b, n, c]
        convolved, gates = self._divided(sequences)
        before = exchange.tokens_before(convolved, self.conv1d.width - 1)
        convolved = self.conv1d(torch.cat([before, convolved], dim=1), ages)

        def recur(convolved: Tensor, gates: Tensor) -> Tensor:
            first = None if ages is None else ages == 0
            state_after = None
            if exchange.parts > 1:
                state_after = exchange.state_before
            outputs, _ = self._recur(convolved, gates, first=first, state_after=state_after)
            return self._gated(outputs.to(mixed.dtype), gates)

        # Backward computes the recurrence again: its products of chunks would be 5 to 10 times as large as its inputs.
        outputs = (recomputed(recur) if self.training else recur)(convolved, gates)
        return outputs.unflatten(0, (exchange.parts, -1)).transpose(1, 2).flatten(0, 1)

    def _ages(self, mixed: Tensor, context: SequenceContext) -> Tensor | None:
        """Number of tokens of its document before each token, ``[parts b, n]``; None without documents."""
        if context.documents is None:
            return None
        ages = context.documents.ages
        if context.positions is not None:
            ages = ages[:, context.positions]
        return ages.unflatten(1, (self.exchange.parts, -1)).transpose(0, 1).flatten(0, 1)

    def _mix_with_cache(self, mixed: Tensor, cache: Any) -> Tensor:
        """Update the states of the texts of a step with its tokens ``[tokens, c]``; return ``[tokens, heads * dv]``."""
        step = cache.step
        width = self.conv1d.width - 1
        shapes = ((width, self.convolved), mixed.dtype), (self.state_shape, wide(mixed.dtype))
        tails, states = cache.states(self.layer_number, *shapes)
        convolved, gates = self._divided(mixed)
        outputs = []

        def advance(first: int, texts: Tensor, count: int, *, begins: Tensor | None) -> None:
            rows = slice(first, first + len(texts) * count)
            before = tails[texts]
            state = states[texts]
            if begins is not None:
                before = before.masked_fill(begins[:, None, None], 0.0)
                state = state.masked_fill(begins[:, None, None, None], 0.0)
            window = torch.cat([before, convolved[rows].unflatten(0, (-1, count))], dim=1)
            pieces = gates[rows].unflatten(0, (-1, count))
            output, state = self._recur(self.conv1d(window, None), pieces, by_steps=count == 1, state=state)
            tails.index_copy_(0, texts, window[:, window.shape[1] - width :])
            states.index_copy_(0, texts, state)
            outputs.append(self._gated(output.to(pieces.dtype), pieces).flatten(0, 1))

        singles = len(step.lengths)
        if singles:
            begins = step.lengths == 1 if step.shortest == 1 else None
            advance(0, step.texts[:singles], 1, begins=begins)
        row = singles
        for number, count in enumerate((*(chunk.count for chunk in step.chunks), *step.fresh), start=singles):
            is_fresh = number >= singles + len(step.chunks)
            texts = step.texts[number : number + 1]
            advance(row, texts, count, begins=torch.ones_like(texts, dtype=torch.bool) if is_fresh else None)
            row += count
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
