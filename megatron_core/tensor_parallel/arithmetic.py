"""The products and sums of layers, as one object that is chosen when a model is built.

Layers ask the object for their products in the constructor, so that no ``forward`` tests which kind it is.
``LayerArithmetic`` sums in the order of the ranks; a feature derives another class (``Feature.arithmetic``).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_core.parallel.collectives import copy_to_region, gather_from_sequence
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import ShardSpec
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.tensor_parallel.linear_comm import NO_COMM, LinearComm
from megatron_core.tensor_parallel.lookup import vocab_parallel_lookup

SplitOver = Callable[..., ShardSpec]
"""Function from ``size``, a number of ranks, to the part of the first of them."""


class Product(Protocol):
    """A product with a weight and the collectives of its layer; see ``parallel_linear``."""

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None, comm: LinearComm = NO_COMM) -> Tensor: ...


def plain_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b in the dtype of ``x``, with gradients of autograd."""
    return nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


# Chosen once when a model is built, and asked by constructors: a test in every forward would put each feature's name
# into each layer.
class LayerArithmetic:
    """Sums in the order of the ranks; base class of the objects of ``Feature.arithmetic``."""

    adds_exactly = False
    """Whether gradients are sums in float64 without rounding errors; then layers add their biases themselves."""
    core_attention: Callable[..., nn.Module] | None = None
    """Constructor from (context, layer number, *, window_size) that replaces those of ``core_attention_of``."""

    def of_layer(self, layer_number: int) -> "LayerArithmetic":
        """The arithmetic inside of a transformer layer; embeddings and the output layer use this object."""
        return self

    def parts_on(self, group: Group) -> int:
        """Number of parts of features, heads and vocabulary on each rank of ``group`` that are summed separately."""
        return 1

    def output_product(self, spec: ShardSpec, split_over: SplitOver, group: Group) -> Product:
        """The product with a weight whose output features are split over ``group`` as ``spec``."""
        return parallel_linear

    def input_product(self, inputs: int, group: Group) -> Product:
        """The product with a weight that has ``inputs`` of the input features, which are split over ``group``."""
        return parallel_linear

    def whole_product(self, outputs: int, ranks: int) -> Product:
        """The product with a whole weight, for tokens that are divided over ``ranks`` tensor-parallel ranks."""
        return parallel_linear

    def token_product(self, outputs: int, ranks: int) -> Callable[..., Tensor]:
        """As ``whole_product`` for the few outputs of a router or gate, called with (x, weight, bias)."""
        return plain_product

    def add_bias(self, x: Tensor, bias: nn.Parameter) -> Tensor:
        """x + bias over the last dim."""
        return x + bias

    def normalise(self, norm: Any, x: Tensor) -> Tensor:
        """Apply a ``transformer.norm.Norm`` to ``x``."""
        return norm.normalised(x, norm.weight, norm.bias)

    def lookup(self, tokens: Tensor, weight: nn.Parameter, first: int, ranks: int, *, in_place: bool = False) -> Tensor:
        """See ``vocab_parallel_lookup``."""
        return vocab_parallel_lookup(tokens, weight, first, ranks, in_place=in_place)

    def lookup_positions(self, positions: Tensor, weight: nn.Parameter, batch: int) -> Tensor:
        """Rows of a whole table for ``[s, b]``, or for ``[s, 1]`` in all ``batch`` sequences."""
        return nn.functional.embedding(positions, weight)

    def loss_sum(self, losses: Tensor) -> Tensor:
        """The sum of losses of tokens."""
        return losses.sum()

    def sequence_sum(self, losses: Tensor) -> Tensor:
        """The sum of terms of a sequence, whose sum is about 1."""
        return losses.sum()

    def scale_loss(self, loss: Tensor, factor: Tensor) -> Tensor:
        """A loss of which backward multiplies the gradient by ``factor``."""
        return loss * factor.to(loss.dtype)

    def divisor(self, terms: Tensor, scale: float) -> Tensor:
        """The divisor of a sum of losses after ``scale_loss`` by ``scale`` / ``terms``."""
        # Gradients are divided by the number of terms in backward (``scale_loss``), so only the scale is left here.
        return torch.full_like(terms, scale)

    def gather_shared(self, shared: Tensor, group: Group, *, sequence_parallel: bool) -> Tensor:
        """The input of ``repeat_for_heads`` for the whole sequence; its gradient is summed over ``group``."""
        # The ranks use the shared input for other heads, so its gradient is a sum over them; both collectives have it
        # as their adjoint.
        if sequence_parallel:
            return gather_from_sequence(shared, group)
        return copy_to_region(shared, group)

    def repeat_for_heads(self, shared: Tensor, heads: int, group: Group) -> Tensor:
        """``[s, b, r]`` -> ``[s, b, heads, r]``."""
        return shared.unsqueeze(2).expand(-1, -1, heads, -1)

    def exact_norm(self, gradients: Sequence[Tensor], group: Group, device: torch.device) -> Tensor:
        """With ``adds_exactly``: the norm of gradients of which each rank of ``group`` has a part."""
        raise NotImplementedError("only an arithmetic with adds_exactly computes the norm")


PLAIN = LayerArithmetic()
