"""The linear layers in a transformer layer, for rules about them and for counting their parameters."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_core.config.feed_forward import LinearLayer, feed_forward_of
from megatron_core.config.mixers import mixer_of
from megatron_core.config.model import ModelConfig
from megatron_core.config.parallel import ParallelConfig


class AddedTensor(NamedTuple):
    """A trained tensor that a feature adds to a transformer layer, with its sizes on a rank."""

    shape: tuple[int, ...]
    experts: int = 0
    """Number of experts on a rank, each of which has its own; 0 outside of experts."""


def linear_layers(model: ModelConfig, parallel: ParallelConfig, layer_number: int) -> Iterator[LinearLayer]:
    """The linear layers of attention, or of a recurrence, and of the feed-forward part."""
    model = model.of_layer(layer_number)
    for projection in mixer_of(model, layer_number).projections(parallel.tensor_model_parallel_size):
        pieces = projection.pieces or (projection.outputs,)
        yield LinearLayer(
            f"self_attention.{projection.module}".rstrip("."), projection.inputs, pieces, frozen=projection.frozen
        )
    yield from mlp_layers(model, parallel, layer_number)


def mlp_layers(model: ModelConfig, parallel: ParallelConfig, layer_number: int) -> Iterator[LinearLayer]:
    """The linear layers of the feed-forward part."""
    sizes = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    return feed_forward_of(model, layer_number).linear_layers(*sizes)
