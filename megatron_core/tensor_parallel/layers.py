"""Linear layers and embeddings split over the tensor-parallel ranks, with Megatron Core's names and arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import DataError, LayoutError
from megatron_core.ops import Backend
from megatron_core.parallel.collectives import (
    gather_channels,
    reduce_from_region,
    reduce_scatter_to_sequence,
    scatter_channels,
)
from megatron_core.parallel.current import tensor_parallel_group
from megatron_core.parallel.groups import Group
from megatron_core.parallel.initialization import InitMethod, Normal, initialise
from megatron_core.parallel.sharding import ShardSpec, allocate, replicated, split
from megatron_core.tensor_parallel.arithmetic import PLAIN, LayerArithmetic
from megatron_core.tensor_parallel.linear_comm import LinearComm


@dataclass(frozen=True, kw_only=True)
# Any object with these attributes serves, because programs pass Megatron's TransformerConfig here.
class ModelParallelConfig:
    """Construction and communication of parallel layers; any object with these attributes is accepted."""

    sequence_parallel: bool = False
    """Split activations outside the matrix products along the sequence."""
    params_dtype: torch.dtype = torch.float32
    """Dtype of weights and activations."""
    tp_comm_overlap: bool = True
    """Overlap communication with matrix products; see --tp-comm-overlap."""
    tp_comm_overlap_chunks: int = 1
    """Parts of a product that is pipelined with its communication; see --tp-comm-overlap-chunks."""
    cp_comm_type: tuple[str, ...] = ("p2p",)
    """Communication of attention over context-parallel ranks, for all layers or per layer; see --cp-comm-type."""
    perform_initialization: bool = True
    """Initialize weights in the layer's constructor; False: the caller does it."""
    kernel_backend: Backend = "auto"
    """Backend of the fused operations; see --kernel-backend."""
    device: torch.device | str = "cpu"
    """Device of the weights."""
    arithmetic: LayerArithmetic = PLAIN
    """Products and sums of the layers."""


def _divide(name: str, extent: int, size: int) -> int:
    if extent % size:
        raise LayoutError(
            f"{name}={extent} cannot be split over tensor_model_parallel_size={size}; use a multiple of {size}"
        )
    return extent // size


# Megatron Core's other arguments: the only supported value, or that the argument has no effect.
_WITHOUT_EFFECT = ("keep_master_weight_for_test", "tp_comm_buffer_name", "name")
# An argument with an effect that is not implemented must fail: a silently ignored one would change results.
_REQUIRED = {
    "stride": 1,
    "is_expert": False,
    "embedding_activation_buffer": None,
    "grad_output_buffer": None,
    "disable_grad_reduce": False,
    "output_dtype": None,
}


def _group_of(tp_group: Group | None, megatron: Mapping[str, Any]) -> Group | None:
    """The group in Megatron Core's arguments; LayoutError if one of them is not supported."""
    for name, value in megatron.items():
        if name not in (*_WITHOUT_EFFECT, *_REQUIRED, "pg_collection"):
            raise TypeError(f"a parallel layer got an unexpected keyword argument {name!r}")
        if name in _REQUIRED and value != _REQUIRED[name]:
            raise LayoutError(f"{name}={value!r} is not supported by parallel layers; omit it")
    return tp_group or getattr(megatron.get("pg_collection"), "tp", None)


class _ParallelLayer(nn.Module):
    """Creates parameters with a ``ShardSpec``, drawn from ``init_method`` (default N(0, 0.02)); biases are zero."""

    def __init__(
        self,
        config: ModelParallelConfig | None,
        init_method: InitMethod | None,
        tp_group: Group | None,
        megatron: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.config = config or ModelParallelConfig()
        self.tp_group = tensor_parallel_group(_group_of(tp_group, megatron))
        self.tp_size = self.tp_group.size()
        self.tp_index = self.tp_group.rank()
        # Megatron's default standard deviation.
        self.init_method = init_method or Normal(0.02)
        self.adapter: Any = None
        """A low-rank adapter of the weight, which then is frozen."""

    def _weight(self, spec: ShardSpec) -> nn.Parameter:
        weight = allocate(spec, self.config.params_dtype, self.config.device)
        weight.init_method = self.init_method
        if self.config.perform_initialization:
            initialise(weight, self.init_method)
        return weight

    def _bias(self, spec: ShardSpec) -> nn.Parameter:
        bias = allocate(spec, self.config.params_dtype, self.config.device)
        # Kept also for weights that are drawn later, by name, when the whole model exists.
        bias.init_method = nn.init.zeros_
        nn.init.zeros_(bias)
        return bias


class ColumnParallelLinear(_ParallelLayer):
    """y = x A^T + b with A split by rows: A = [A_1; ...; A_p]; rank i computes columns i of y.

    Input ``[s, b, input_size]``, replicated (``[s/tp, b, input_size]`` with sequence parallel); output ``[s, b,
    output_size/tp]``, or ``[s, b, output_size]`` with ``gather_output``. ``forward`` returns ``(output, bias)``, where
    bias is None unless ``skip_bias_add``. ``spec(shape, index=, size=)`` replaces the even split of the rows over
    ``size`` ranks (fused matrices). Weight ``[output_size/tp, input_size]``, bias ``[output_size/tp]``.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        tp_group: Group | None = None,
        spec: Callable[..., ShardSpec] | None = None,
        **megatron: Any,
    ) -> None:
        super().__init__(config, init_method, tp_group, megatron)
        # Parts of a given spec need not be even.
        if spec is None:
            _divide("output_size", output_size, self.tp_size)
        spec_of_part = spec or (lambda shape, index, size: split(shape, 0, index, size))
        spec = partial(spec_of_part, index=self.tp_index, size=self.tp_size)
        self.input_size = input_size
        self.output_size = output_size
        arithmetic = self.config.arithmetic
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add and not arithmetic.adds_exactly
        weight_spec = spec((output_size, input_size))
        self.output_size_per_partition = weight_spec.local_shape[0]
        self.weight = None if skip_weight_param_allocation else self._weight(weight_spec)
        self.bias = self._bias(spec((output_size,))) if bias else None
        self.comm = LinearComm(
            self.tp_group,
            gather_sequence=self.config.sequence_parallel,
            reduce_input_grad=not self.config.sequence_parallel,
            overlap=self.config.tp_comm_overlap,
            chunks=self.config.tp_comm_overlap_chunks,
        )
        # The arithmetic may need the parts of another number of ranks, to add in the order of a larger layout.
        split_over = partial(spec_of_part, (output_size, input_size), index=0)
        self.product = arithmetic.output_product(weight_spec, split_over, self.tp_group)

    def forward(self, input_: Tensor, weight: nn.Parameter | None = None) -> tuple[Tensor, Tensor | None]:
        """Multiply by the layer's weight, or by ``weight`` if given (a tied embedding)."""
        weight = self.weight if weight is None else weight
        if weight is None:
            raise LayoutError("skip_weight_param_allocation=True: the layer has no weight; pass forward(x, weight=...)")
        bias = None if self.skip_bias_add else self.bias
        # An adapter adds its product to that of the frozen weight, and the bias must be added once.
        if self.adapter is None:
            output = self.product(input_, weight, bias, self.comm)
        else:
            product = partial(self.product, weight=weight, bias=None, comm=self.comm)
            output = self.adapter(input_, product, weight)
            output = output if bias is None else output + bias
        # Backward takes this rank's columns: all ranks compute the same loss from the gathered output.
        if self.gather_output:
            output = gather_channels(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinear(_ParallelLayer):
    """y = x A^T + b with A split by columns: rank i multiplies part i of x, and the products are summed.

    Input ``[s, b, input_size/tp]`` (``[s, b, input_size]`` with ``input_is_parallel=False``); output ``[s, b,
    output_size]``, or ``[s/tp, b, output_size]`` with sequence parallel. The bias is added once, after the sum.
    ``forward`` returns ``(output, bias)``, where bias is None unless ``skip_bias_add``. Weight ``[output_size,
    input_size/tp]``, bias ``[output_size]``, replicated.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        tp_group: Group | None = None,
        **megatron: Any,
    ) -> None:
        super().__init__(config, init_method, tp_group, megatron)
        _divide("input_size", input_size, self.tp_size)
        self.input_size = input_size
        self.output_size = output_size
        arithmetic = self.config.arithmetic
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add and not arithmetic.adds_exactly
        # Splitting a replicated input is an operation over whole sequences, which no rank has.
        if self.config.sequence_parallel and not input_is_parallel:
            raise LayoutError("sequence_parallel=True needs input_is_parallel=True in a RowParallelLinear")
        spec = split((output_size, input_size), 1, self.tp_index, self.tp_size)
        self.weight = self._weight(spec)
        # With sequence parallel each rank adds the bias to its part of the sequence only.
        bias_spec = replicated((output_size,), self.tp_index, partial_grad=self.config.sequence_parallel)
        self.bias = self._bias(bias_spec) if bias else None
        self.comm = LinearComm(
            self.tp_group,
            scatter_sequence=self.config.sequence_parallel,
            reduce_output=not self.config.sequence_parallel,
            overlap=self.config.tp_comm_overlap,
            chunks=self.config.tp_comm_overlap_chunks,
        )
        self.product = arithmetic.input_product(self.weight.shape[1], self.tp_group)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply this rank's part and sum over ranks."""
        if not self.input_is_parallel:
            input_ = scatter_channels(input_, self.tp_group)
        adapter = self.adapter
        product = self._product
        output = product(input_) if adapter is None else adapter(input_, product, self.weight)
        # Added after the sum: in the product, every rank would add it.
        if self.bias is None or self.skip_bias_add:
            return output, self.bias
        return self.config.arithmetic.add_bias(output, self.bias), None

    def _product(self, input_: Tensor) -> Tensor:
        """The product with the whole weight, summed over ranks."""
        return self.product(input_, self.weight, None, self.comm)


class VocabParallelEmbedding(_ParallelLayer):
    """Rows of a table ``[num_embeddings, embedding_dim]``, split by rows over the ranks.

    ids ``[b, s]`` -> ``[b, s, h]``, or ``[s/tp, b, h]`` with ``reduce_scatter_embeddings``. The table is padded to
    ``padded_size`` rows (default num_embeddings); padding is zero and never looked up.
    Source: Shoeybi et al. 2019, section 3.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod | None = None,
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig | None = None,
        tp_group: Group | None = None,
        padded_size: int | None = None,
        **megatron: Any,
    ) -> None:
        super().__init__(config, init_method, tp_group, megatron)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        padded_size = padded_size or num_embeddings
        rows = _divide("num_embeddings", padded_size, self.tp_size)
        self.vocab_start_index = self.tp_index * rows
        self.vocab_end_index = (self.tp_index + 1) * rows
        spec = split((num_embeddings, embedding_dim), 0, self.tp_index, self.tp_size, padded=padded_size)
        self.weight = self._weight(spec)

    def forward(self, input_: Tensor) -> Tensor:
        """Look up the ids ``input_``; rows of other ranks are zero here, and the sum over ranks completes them.

        Errors: ``DataError`` on the CPU for an id outside the vocabulary; on a GPU the check would wait for the device.
        """
        # The ids are read, which on a GPU would wait for all queued work in every step.
        if input_.is_cpu and not torch.compiler.is_compiling():
            _check_ids(input_, self.num_embeddings)
        # The reference computes with autograd alone.
        in_place = self.config.kernel_backend != "reference"
        lookup = self.config.arithmetic.lookup
        embedded = lookup(input_, self.weight, self.vocab_start_index, self.tp_size, in_place=in_place)
        if self.reduce_scatter_embeddings:
            # One collective for the sum over ranks and the split of the sequence, with half of the bytes of an
            # all-reduce.
            return reduce_scatter_to_sequence(embedded.transpose(0, 1), self.tp_group)
        return reduce_from_region(embedded, self.tp_group)


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    if not ids.numel():
        return
    lowest, highest = (int(end) for end in ids.aminmax())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise DataError(
            f"token id {wrong} is outside the vocabulary of {vocab_size} tokens; use the tokenizer of the model, or a "
            "larger vocabulary"
        )


def vocabulary_per_rank(vocab_size: int, divisible_by: int, tp_size: int) -> int:
    """Rows of the padded vocabulary per rank: vocab_size is rounded up to a multiple of divisible_by x tp_size."""
    unit = divisible_by * tp_size
    return -(-vocab_size // unit) * unit // tp_size
