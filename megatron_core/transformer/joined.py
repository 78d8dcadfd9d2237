"""One reduction over tensor-parallel ranks for parts of a layer with the same input, whose outputs are added."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from operator import add

from torch import Tensor, nn

from megatron_core.parallel.collectives import reduce_from_region, reduce_scatter_to_sequence
from megatron_core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron_core.tensor_parallel.linear_comm import LinearComm, SharedInput
from megatron_core.transformer.context import LayerContext


class JoinedParts:
    """The reductions of ``sublayers``: one of the sum of their outputs, and in backward one of their input's gradients.

    The sum over ranks of a + m is computed instead of the sums of a and of m. Inputs of sequence-parallel layers are
    gathered by each part, so that no gathered input is kept for backward.
    """

    def __init__(self, sublayers: Sequence[nn.Module]) -> None:
        self._linears = [
            module
            for sublayer in sublayers
            for module in sublayer.modules()
            if isinstance(module, ColumnParallelLinear | RowParallelLinear)
        ]
        self.partial = [*sublayers, *(linear for linear in self._linears if isinstance(linear, RowParallelLinear))]
        """The modules whose outputs are one rank's part of the sum."""
        # Kept for ``separate``: adapters are added to a model that exists.
        self._comms: list[LinearComm] = [linear.comm for linear in self._linears]
        self._input = SharedInput(len(sublayers))
        for linear in self._linears:
            if isinstance(linear, ColumnParallelLinear):
                # The gradients of both uses of the normed input are added before one reduction.
                linear.comm = replace(linear.comm, shared_input=self._input)
            else:
                linear.comm = replace(linear.comm, scatter_sequence=False, reduce_output=False)
                self._group = linear.tp_group
                self._scatters = linear.config.sequence_parallel

    @classmethod
    def of(cls, sublayers: Sequence[nn.Module], context: LayerContext) -> "JoinedParts | None":
        """Join ``sublayers``; None if ranks do not split them, or need the output of each part.

        Canonical parts (--layout-invariant) are added in an order of their own, and --tp-comm-overlap-chunks pipelines
        each product with its reduction.
        """
        parallel = context.parallel
        # Without a reduction there is nothing to join.
        if context.tp_group.size() == 1 or parallel.arithmetic.adds_exactly or parallel.tp_comm_overlap_chunks > 1:
            return None
        return cls(sublayers) if all(map(is_joinable, sublayers)) else None

    def reduced(self, output: Tensor) -> Tensor:
        """Sum the outputs of a rank over the ranks; with sequence parallelism the result is split along it."""
        self._input.clear()
        return (reduce_scatter_to_sequence if self._scatters else reduce_from_region)(output, self._group)

    def separate(self) -> None:
        """Restore the reductions of each part."""
        for linear, comm in zip(self._linears, self._comms, strict=True):
            linear.comm = comm


def added(outputs: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """Return the sum of several outputs, and that of their biases or None."""
    biases = [bias for _, bias in outputs if bias is not None]
    return reduce(add, (output for output, _ in outputs)), reduce(add, biases) if biases else None


def separate_parts(layers: Iterable[nn.Module]) -> None:
    """Let each part of ``layers`` reduce its own outputs: for adapters, which add reduced outputs, and for graphs."""
    for module in (module for layer in layers for module in layer.modules()):
        joined = getattr(module, "joined", None)
        if isinstance(joined, JoinedParts):
            joined.separate()
            module.joined = None  # type: ignore[assignment]


def is_joinable(sublayer: nn.Module) -> bool:
    """Whether ``sublayer`` has one column-parallel layer for its input and one row-parallel layer, as its class says in
    ``is_joinable``; derived classes say so themselves, because they may have further layers."""
    return bool(vars(type(sublayer)).get("is_joinable", False))
