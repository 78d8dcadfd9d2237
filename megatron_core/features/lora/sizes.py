"""Sizes of adapters."""

from collections.abc import Iterator

from megatron_core.config import ParallelConfig, RunConfig
from megatron_core.config.linear_layers import AddedTensor, linear_layers
from megatron_core.features.lora.settings import PARTS, WHOLE, TuningConfig


def adapter_tensors(config: RunConfig, parallel: ParallelConfig, layer_number: int) -> Iterator[AddedTensor]:
    """The adapters of a layer: A and B of each part of a matrix, and DoRA's magnitudes.

    Only one side of a split matrix is divided over the ranks, and each expert has its own adapters.
    """
    tuning = config.section(TuningConfig)
    rank = tuning.lora_rank or 0
    for path, inputs, pieces, experts, _ in linear_layers(config.model, parallel, layer_number):
        for weight_part in tuning.parts_of(f"decoder.layers.{layer_number}.{path}", fused=len(pieces)):
            first, end = (
                (0, len(pieces)) if weight_part == WHOLE else PARTS[path.rpartition(".")[2], len(pieces)][weight_part]
            )
            rows = sum(pieces[first:end])
            yield AddedTensor((rank, inputs), experts)
            yield AddedTensor((rows, rank), experts)
            if tuning.use_dora:
                yield AddedTensor((rows,))
