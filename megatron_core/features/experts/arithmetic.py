"""The products of experts, and the order of their rows, for arithmetics of layers that compute them differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megatron_core.features.experts.grouped_linear import grouped_linear
from megatron_core.parallel.groups import Group
from megatron_core.parallel.sharding import ShardSpec
from megatron_core.tensor_parallel.arithmetic import LayerArithmetic, SplitOver


@dataclass(frozen=True)
class TokenNumbers:
    """Numbers of this rank's tokens that give the rows of an expert one order in every layout."""

    of_tokens: Tensor
    """``[T]`` int64: sequence x its length + position."""
    chunk: int
    """Tokens in a chunk of a sequence."""


@dataclass(frozen=True)
class Chunks:
    """The rows of each expert in chunks of sequences: rows are ordered by expert, sequence and position."""

    experts: tuple[slice, ...]
    """The rows of each expert."""
    of_expert: tuple[tuple[slice, ...], ...]
    """For each expert, the rows of each chunk of a sequence that has any."""


class ExpertArithmetic:
    """Plain products of experts; base class of a ``LayerArithmetic`` with others."""

    def expert_output_product(self, spec: ShardSpec, split_over: SplitOver, group: Group) -> Callable[..., Tensor]:
        """As ``output_product`` for a stack of experts, called as ``grouped_linear`` with the chunks of the rows."""
        return expert_product

    def expert_input_product(self, inputs: int, group: Group) -> Callable[..., Tensor]:
        """As ``input_product`` for a stack of experts."""
        return expert_product

    def times_probs(self, activated: Tensor, probs: Tensor, group: Group) -> Tensor:
        """Rows ``[R, n]``, of which the ranks of ``group`` have other columns, times their probabilities ``[R]``."""
        # Probabilities are float32 or wider; the product keeps the dtype of the rows.
        return (activated * probs.unsqueeze(-1)).to(activated.dtype)

    def token_numbers(self, positions: Tensor, sample_index: Tensor | None, ranks: int) -> TokenNumbers | None:
        """Numbers of tokens that order the rows of experts; None: any order.

        ``positions`` are those of tokens of each sequence, which are divided over ``ranks`` tensor-parallel ranks;
        ``sample_index`` the numbers of the sequences, or None in generation.
        """
        return None


def expert_arithmetic(arithmetic: LayerArithmetic) -> ExpertArithmetic:
    """The products of experts in layers with ``arithmetic``."""
    return arithmetic if isinstance(arithmetic, ExpertArithmetic) else ExpertArithmetic()


def expert_product(x: Tensor, weight: nn.Parameter, counts: Sequence[int], chunks: Chunks | None = None) -> Tensor:
    """``grouped_linear`` with the arguments of the products of experts."""
    return grouped_linear(x, weight, counts)
