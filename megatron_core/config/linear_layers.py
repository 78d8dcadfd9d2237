"""The linear layers in a transformer layer, for rules about them and for counting their parameters."""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_core.config.mixers import mixer_of
from megatron_core.config.model import ModelConfig
from megatron_core.config.parallel import ParallelConfig


class LinearLayer(NamedTuple):
    """A linear layer with its sizes on a rank."""

    path: str
    """Name in the transformer layer, such as ``mlp.linear_fc1``."""
    inputs: int
    pieces: tuple[int, ...]
    """Outputs of each matrix that it consists of; several if it is fused."""
    experts: int = 0
    """Number of experts on a rank, each of which has its own; 0 outside of experts."""
    frozen: bool = False
    """Whether its weight is not trained."""


class AddedTensor(NamedTuple):
    """A trained tensor that a feature adds to a transformer layer, with its sizes on a rank."""

    shape: tuple[int, ...]
    experts: int = 0
    """Number of experts on a rank, each of which has its own; 0 outside of experts."""


def linear_layers(model: ModelConfig, parallel: ParallelConfig, layer_number: int) -> Iterator[LinearLayer]:
    """The linear layers of attention, or of a recurrence, and of the MLP or the experts."""
    model = model.of_layer(layer_number)
    for projection in mixer_of(model, layer_number).projections(parallel.tensor_model_parallel_size):
        pieces = projection.pieces or (projection.outputs,)
        yield LinearLayer(
            f"self_attention.{projection.module}".rstrip("."), projection.inputs, pieces, frozen=projection.frozen
        )
    yield from mlp_layers(model, parallel, layer_number)


def mlp_layers(model: ModelConfig, parallel: ParallelConfig, layer_number: int) -> Iterator[LinearLayer]:
    """The linear layers of the MLP, or of the experts and the shared expert."""
    model = model.of_layer(layer_number)
    widths, tp = [], parallel.tensor_model_parallel_size
    if model.block_of(layer_number).mlp.linear:
        yield LinearLayer("mlp", model.hidden_size, (model.hidden_size // tp,))
    if model.has_dense_mlp(layer_number):
        widths.append(("mlp", model.ffn_size // tp, 0))
    if model.has_experts(layer_number):
        local = (model.num_experts or 0) // parallel.expert_model_parallel_size
        widths.append(("mlp.experts", model.expert_ffn_size // parallel.expert_tensor_size, local))
        if model.moe_latent_size is not None:
            yield LinearLayer("mlp.fc1_latent_proj", model.hidden_size, (model.moe_latent_size,))
            yield LinearLayer("mlp.fc2_latent_proj", model.moe_latent_size, (model.hidden_size,))
        if (shared := model.moe_shared_expert_intermediate_size) is not None:
            widths.append(("mlp.shared_experts", shared // tp, 0))
    for path, width, experts in widths:
        inner = (width, width) if model.gated_linear_unit else (width,)
        outer = model.expert_hidden_size if experts else model.hidden_size
        yield LinearLayer(f"{path}.linear_fc1", outer, inner, experts)
        yield LinearLayer(f"{path}.linear_fc2", width, (outer,), experts)
