"""The linear layers in a transformer layer, and its feed-forward part: an MLP, or a part in its place."""

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from megatron_core.config.mixers import mixer_of
from megatron_core.config.model import ModelConfig
from megatron_core.feature import features, load_hook

if TYPE_CHECKING:
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

    @property
    def elements(self) -> int:
        """Elements of its weight, of one expert."""
        return self.inputs * sum(self.pieces)


class AddedTensor(NamedTuple):
    """A trained tensor that a feature adds to a transformer layer, with its sizes on a rank."""

    shape: tuple[int, ...]
    experts: int = 0
    """Number of experts on a rank, each of which has its own; 0 outside of experts."""


class FeedForward:
    """Sizes of the feed-forward part of the layers of ``model``: an MLP, or nothing; a feature derives other kinds."""

    recomputed_as: ClassVar[str] = "mlp"
    """The word of --recompute-modules for the whole part."""

    def __init__(self, model: ModelConfig, name: str | None) -> None:
        """``name``: the value of ``ModelConfig.feed_forward_name``."""
        self.model = model
        self.name = name

    def linear_layers(self, tp: int = 1, ep: int = 1, etp: int = 1) -> Iterator[LinearLayer]:
        """The linear layers; ``ep``, ``etp``: numbers of ranks that split experts, and the matrices of each."""
        if self.name == "mlp":
            yield from self.pair("mlp", self.model.hidden_size, self.model.ffn_size // tp)

    def pair(self, path: str, outer: int, width: int, experts: int = 0) -> Iterator[LinearLayer]:
        """The layers from ``outer`` channels to the activation function, and back, with ``width`` between them."""
        yield LinearLayer(f"{path}.linear_fc1", outer, (width,) * (2 if self.model.gated_linear_unit else 1), experts)
        yield LinearLayer(f"{path}.linear_fc2", width, (outer,), experts)

    def router_matrices(self) -> Iterator[tuple[int, int]]:
        """Outputs and inputs of further matrices, which choose experts or weight them; every rank has them."""
        return iter(())

    def saved_bytes(self, number: int, etp: int) -> float:
        """Bytes per token that all tensor-parallel ranks save for backward; ``number``: bytes of a number."""
        saves = self.name == "mlp" and not self.model.recomputes("mlp")
        return saves * number * self.model.ffn_size * (3 if self.model.gated_linear_unit else 2)

    def flops(self) -> dict[str, int]:
        """Forward FLOPs of a token, by term of ``forward_flops_per_token``."""
        return {"mlp": 2 * sum(layer.elements for layer in self.linear_layers())}


def feed_forward_of(model: ModelConfig, layer_number: int) -> FeedForward:
    """The feed-forward part of a layer (numbered from 0) with the sizes of the layer."""
    name = model.feed_forward_name(layer_number)
    sizes = FeedForward if name in ("mlp", None) else _sizes_of_a_feature(name)
    return sizes(model.of_layer(layer_number), name)


@cache
def _sizes_of_a_feature(name: Any) -> type[FeedForward]:
    hook = next(feature.feed_forwards[name] for feature in features() if name in feature.feed_forwards)
    return load_hook(hook)


def linear_layers(model: ModelConfig, parallel: "ParallelConfig", layer_number: int) -> Iterator[LinearLayer]:
    """The linear layers of attention, or of a recurrence, and of the feed-forward part."""
    model = model.of_layer(layer_number)
    for projection in mixer_of(model, layer_number).projections(parallel.tensor_model_parallel_size):
        pieces = projection.pieces or (projection.outputs,)
        yield LinearLayer(
            f"self_attention.{projection.module}".rstrip("."), projection.inputs, pieces, frozen=projection.frozen
        )
    yield from mlp_layers(model, parallel, layer_number)


def mlp_layers(model: ModelConfig, parallel: "ParallelConfig", layer_number: int) -> Iterator[LinearLayer]:
    """The linear layers of the feed-forward part."""
    sizes = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_size
    return feed_forward_of(model, layer_number).linear_layers(*sizes)
