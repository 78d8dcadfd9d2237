"""The products and sums of layers with equal bits in every layout."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.features.context_parallelism.core_attention import tiled_attention
from megatron_core.features.equal_bits import exact_sum, linear
from megatron_core.features.equal_bits.attention import InvariantAttention
from megatron_core.features.equal_bits.invariance import (
    Invariance,
    all_reduce_in_tree,
    invariant_reduce_from_region,
    invariant_reduce_scatter_to_sequence,
)
from megatron_core.features.experts.grouped_linear import Chunks, ExpertArithmetic, TokenNumbers
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import all_reduce_, gather_from_sequence
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import ShardSpec
from megatron_core.parallel.tree_sum import tree_sum
from megatron_core.tensor_parallel.arithmetic import LayerArithmetic, Product, SplitOver
from megatron_core.tensor_parallel.linear_comm import NO_COMM, LinearComm

ROWS_OF_EXPERTS = 32
"""Rows of a product of an expert: the last of them is filled with zeros."""


def exact_arithmetic(config: RunConfig, context: Group, data_ranks: int) -> "ExactArithmetic":
    """The arithmetic of a run; see ``Feature.arithmetic``."""
    batch = config.training.final_batch_size(data_ranks)
    chunks = config.parallel.layout_invariant_chunks
    invariance = Invariance(
        feature_parts=config.invariant_parts,
        chunks=chunks,
        # Layers of multi-token prediction add further addends to the weights that they share.
        sequences=batch * (1 + config.model.added_layers),
        sequence_length=config.data.seq_length,
        context_ranks=context.size(),
    )
    return ExactArithmetic(invariance)


@dataclass(frozen=True)
class ExactProduct:
    """``invariant_linear`` with the sum of its output over ranks, in the order of the tree."""

    weight_parts: linear.WeightParts

    def __call__(self, x: Tensor, weight: nn.Parameter, bias: Tensor | None, comm: LinearComm = NO_COMM) -> Tensor:
        """See ``parallel_linear``."""
        output = linear.invariant_linear(x, weight, bias, comm, self.weight_parts)
        if comm.scatter_sequence:
            return invariant_reduce_scatter_to_sequence(output, comm.group)
        return invariant_reduce_from_region(output, comm.group) if comm.reduce_output else output


class ExactArithmetic(LayerArithmetic, ExpertArithmetic):
    """Sums in the order of ``Invariance``, and gradients of parameters that are exact sums."""

    adds_exactly = True

    def __init__(self, invariance: Invariance) -> None:
        self.invariance = invariance
        self.core_attention = partial(tiled_attention, attention=partial(InvariantAttention, invariance=invariance))

    def parts_on(self, group: Group) -> int:
        """Number of canonical parts on each rank."""
        return self.invariance.local_parts(group)

    def output_product(self, spec: ShardSpec, split_over: SplitOver, group: Group) -> Product:
        """A product for each part of the output features."""
        return ExactProduct(
            linear.WeightParts.of_output(self.invariance, spec, split_over(size=self.invariance.feature_parts))
        )

    def input_product(self, inputs: int, group: Group) -> Product:
        """A product for each part of the input features."""
        return ExactProduct(linear.WeightParts.even(self.invariance, inputs, self.parts_on(group), splits_output=False))

    def whole_product(self, outputs: int, ranks: int) -> Product:
        """One product."""
        return ExactProduct(linear.WeightParts.even(self.invariance.over(ranks), outputs, 1, splits_output=True))

    def token_product(self, outputs: int, ranks: int) -> Callable[..., Tensor]:
        """One product, whose gradient of ``x`` is complete before others are added to it."""
        product = self.whole_product(outputs, ranks)

        def multiply(x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
            return product(x.view_as(x), weight, bias)

        return multiply

    def expert_output_product(self, spec: ShardSpec, split_over: SplitOver, group: Group) -> Callable[..., Tensor]:
        """A product for each part of the output features of each expert."""
        weight_parts = linear.WeightParts.of_output(
            self.invariance, spec, split_over(size=self.invariance.feature_parts)
        )
        return partial(_grouped_product, weight_parts=replace(weight_parts, rows=ROWS_OF_EXPERTS))

    def expert_input_product(self, inputs: int, group: Group) -> Callable[..., Tensor]:
        """A product for each part of the input features of each expert."""
        weight_parts = linear.WeightParts.even(self.invariance, inputs, self.parts_on(group), splits_output=False)
        return partial(_grouped_product, weight_parts=replace(weight_parts, rows=ROWS_OF_EXPERTS))

    def times_probs(self, activated: Tensor, probs: Tensor, group: Group) -> Tensor:
        """The same, with gradients of the probabilities that are sums over parts."""
        return _TimesProbs.apply(activated, probs, self.parts_on(group))

    def add_bias(self, x: Tensor, bias: nn.Parameter) -> Tensor:
        """x + bias with an exact gradient of the bias."""
        return linear.add_bias(x, bias, self.invariance)

    def normalise(self, norm: Any, x: Tensor) -> Tensor:
        """The norm, with exact gradients of its parameters."""
        if not torch.is_grad_enabled():
            return super().normalise(norm, x)
        return _ExactNorm.apply(x, norm.weight, norm.bias, norm, self.invariance.tokens * norm.heads)

    def lookup(self, tokens: Tensor, weight: nn.Parameter, first: int, ranks: int, *, in_place: bool = False) -> Tensor:
        """Rows of the table, with an exact gradient."""
        return linear.invariant_lookup(tokens, weight, first, self.invariance)

    def lookup_positions(self, positions: Tensor, weight: nn.Parameter, batch: int) -> Tensor:
        """A row for each sequence, because the gradients of all rows are added exactly."""
        return linear.invariant_lookup(positions.expand(-1, batch), weight, 0, self.invariance)

    def loss_sum(self, losses: Tensor) -> Tensor:
        """The exact sum."""
        return exact_sum.exact_loss_sum(losses, self.invariance.tokens)

    def sequence_sum(self, losses: Tensor) -> Tensor:
        """The exact sum."""
        return exact_sum.exact_loss_sum(losses, self.invariance.tokens, exact_sum.BALANCING_UNIT)

    def scale_loss(self, loss: Tensor, factor: Tensor) -> Tensor:
        """The loss itself: a product would round it in another way than its exact sum."""
        return exact_sum.scale_gradient(loss, factor)

    def divisor(self, terms: Tensor, scale: float) -> Tensor:
        """The number of terms."""
        return terms

    def gather_shared(self, shared: Tensor, group: Group, *, sequence_parallel: bool) -> Tensor:
        """The whole sequence; ``repeat_for_heads`` sums the gradient over ranks."""
        return gather_from_sequence(shared, group, partial_grad=False) if sequence_parallel else shared

    def repeat_for_heads(self, shared: Tensor, heads: int, group: Group) -> Tensor:
        """The same, with a gradient that is a sum over parts."""
        return _RepeatForHeads.apply(shared, heads, self.parts_on(group), group)

    def token_numbers(self, positions: Tensor, sample_index: Tensor | None, ranks: int) -> TokenNumbers:
        """Numbers by sequence and position."""
        if sample_index is None:
            assert not torch.is_grad_enabled(), "in training tokens are numbered by sequence"
            return TokenNumbers(torch.arange(positions.numel(), device=positions.device), 1)
        length = positions.shape[0] * self.invariance.over(ranks).context_ranks
        numbers = sample_index * length + positions[:, None]
        return TokenNumbers(numbers.flatten(), length // self.invariance.chunks)

    def exact_norm(self, gradients: Sequence[Tensor], group: Group, device: torch.device) -> Tensor:
        """The norm from an exact sum of squares, relative to a power of two above all gradients."""
        largest = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in gradients:
            if gradient.numel():
                lowest, highest = gradient.aminmax()
                largest = torch.maximum(largest, torch.maximum(-lowest, highest).to(largest))
        all_reduce_(largest, group, maximum=True)
        if not bool(largest.isfinite()) or not bool(largest):
            return largest  # inf, nan or 0
        scale = 2.0 ** math.frexp(float(largest))[1]
        words = exact_sum.exact_squares(gradients, scale).to(device)
        all_reduce_(words, group)
        return exact_sum.sum_of_squares(words, scale).sqrt()


def _grouped_product(
    x: Tensor,
    weight: nn.Parameter,
    counts: Sequence[int],
    chunks: Chunks | None = None,
    *,
    weight_parts: linear.WeightParts,
) -> Tensor:
    assert chunks is not None, "tokens have numbers if weights have canonical parts"
    return linear.invariant_grouped_linear(x, weight, chunks, weight_parts)


class _ExactNorm(torch.autograd.Function):
    """A norm whose parameters' gradients are exact sums over rows."""

    @staticmethod
    def forward(ctx, x, weight, bias, norm, terms):
        ctx.save_for_backward(x)
        ctx.norm = norm
        ctx.terms = terms
        return norm.normalised(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        norm = ctx.norm
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = None
        if needs_x:  # the operation's own backward; its gradients of the parameters are sums in other orders
            with torch.enable_grad():
                again = x.detach().requires_grad_()
                bias = None if norm.bias is None else norm.bias.detach()
                (grad_x,) = torch.autograd.grad(norm.normalised(again, norm.weight.detach(), bias), again, grad)
        if needs_weight:
            dtype = wide(x.dtype)
            one = torch.ones_like(norm.weight, dtype=dtype)
            scaled = norm.plain_norm(x.to(dtype), one, None if norm.bias is None else torch.zeros_like(one))
            exact_sum.add_rows_exactly_(linear.exact_grad_of(norm.weight), scaled.mul_(grad), ctx.terms)
        if needs_bias:
            exact_sum.add_rows_exactly_(linear.exact_grad_of(norm.bias), grad, ctx.terms)
        return grad_x, None, None, None, None


class _RepeatForHeads(torch.autograd.Function):
    """``[s, b, r]`` -> ``[s, b, heads, r]``; backward adds heads of a canonical part in turn, then parts and ranks in
    the order of the tree."""

    @staticmethod
    def forward(ctx, x, heads, count, group):
        ctx.parts = count
        ctx.group = group
        return x.unsqueeze(2).expand(-1, -1, heads, -1)

    @staticmethod
    def backward(ctx, grad):
        of_parts = [reduce(torch.add, heads_grad.unbind(2)) for heads_grad in grad.chunk(ctx.parts, dim=2)]
        return all_reduce_in_tree(tree_sum(of_parts), ctx.group), None, None, None


class _TimesProbs(torch.autograd.Function):
    """Rows times their probabilities, whose gradients are sums over canonical parts of the features in their tree."""

    @staticmethod
    def forward(ctx, activated, probs, count):
        ctx.save_for_backward(activated, probs)
        ctx.parts = count
        return (activated * probs.unsqueeze(-1)).to(activated.dtype)

    @staticmethod
    def backward(ctx, grad):
        activated, probs = ctx.saved_tensors
        products = grad.to(probs.dtype) * activated
        sums = [channels.contiguous().sum(-1) for channels in products.chunk(ctx.parts, -1)]
        return (grad * probs.unsqueeze(-1)).to(activated.dtype), tree_sum(sums), None
