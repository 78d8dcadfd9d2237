"""State of optimizers that keep some for whole matrices, from the shapes of a model's matrices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron_core.config import ParallelConfig, RunConfig
from megatron_core.config.linear_layers import linear_layers
from megatron_core.planner.parameters import added_tensors, trains_whole_model

QKV = "linear_qkv"


class Matrices(NamedTuple):
    """Trained matrices of one shape, over all ranks."""

    pieces: tuple[int, ...]
    """Rows of each matrix that is stored in one."""
    columns: int
    copies: int = 1
    """Number of such matrices, such as those of the experts of a layer."""
    has_heads: bool = False
    """Whether the pieces are queries, keys and values."""


def matrix_state_elements(config: RunConfig, layers: list[int], *, has_mtp: bool) -> int:
    """Elements of the state of the hidden matrices in ``layers`` over all ranks, 0 for most optimizers.

    ``has_mtp``: also those of the multi-token prediction layers.
    """
    elements = config.optimizer.kind_of(hidden=True).matrix_elements
    if elements is None:
        return 0
    model = config.model
    owned = [owner for layer in layers for owner in _matrices(config, layer)]
    for _ in range(model.distinct_added_layers * has_mtp):
        if added_tensors(config) is None:
            owned += [*_matrices(config, model.num_layers), Matrices((model.hidden_size,), 2 * model.hidden_size)]
    return sum(
        owner.copies * elements(config.optimizer, owner.pieces, owner.columns, owner.has_heads) for owner in owned
    )


def _matrices(config: RunConfig, layer_number: int) -> Iterator[Matrices]:
    """The trained hidden matrices of a layer."""
    model = config.model
    tensors_of = added_tensors(config)
    if tensors_of is not None:
        for shape, experts in tensors_of(config, ParallelConfig(), layer_number):
            if len(shape) == 2:
                yield Matrices(shape[:1], shape[1], experts or 1)
        return
    is_warmup = not trains_whole_model(config)  # of indexers, while all other weights are frozen
    for path, inputs, pieces, experts, frozen in linear_layers(model, ParallelConfig(), layer_number):
        name = path.rpartition(".")[2]
        if not frozen and not (is_warmup and "indexer" not in path):
            if name == QKV and model.attention_output_gate:  # queries and gates are pieces of their own
                pieces = pieces[0] // 2, pieces[0] // 2, *pieces[1:]
            yield Matrices(pieces, inputs, experts or 1, name == QKV)
    weights = model.connection_elements[0] // model.stream_size
    if weights and not is_warmup:
        yield Matrices((weights,), model.stream_size, model.has_mixer(layer_number) + model.has_mlp(layer_number))
    if model.has_experts(layer_number) and not is_warmup:
        yield Matrices((model.num_experts or 0,), model.hidden_size)
        if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is not None:
            yield Matrices((1,), model.hidden_size)
