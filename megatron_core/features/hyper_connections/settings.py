"""Settings of hyper-connections, and their rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.model import ModelConfig
from megatron_core.config.partition import layers_by_stage
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Condition, Resume, section, setting
from megatron_core.errors import MegatronError

CONNECTIONS = Condition("--enable-mhc-connections", lambda run: run.model.enable_mhc_connections)
REFUSED = {
    "mtp_num_layers": "its layers continue one stream",
    "parallel_residual": "attention and MLP have connections of their own",
    "use_mup": "its factors are those of one stream",
    "layout_invariant": "sums over tokens of the connections' gradients depend on the layout",
    "heterogeneous_layers_config_encoded_json": "its layers may lack attention or MLP",
    "hybrid_layer_pattern": "its layers have one part each",
}
"""Settings that cannot be used with hyper-connections, with the reason."""


@dataclass(frozen=True, kw_only=True)
@section(needs=CONNECTIONS, resume=Resume.TENSORS)
class HyperConnectionsConfig(ModelConfig):
    """Manifold-constrained hyper-connections (mHC)."""

    enable_mhc_connections: bool = setting(False, when=ALWAYS)
    """Replace the residual stream by several ones: attention and MLP read a weighted sum of the streams, write to each
    of them with a weight, and a doubly stochastic matrix mixes the streams; all weights depend on the token (Xie et al.
    2025, arXiv 2512.24880)."""
    mhc_num_residual_streams: int = setting(4, r.SIZE, aliases="num_residual_streams")
    """Number of residual streams."""
    mhc_sinkhorn_iterations: int = setting(20, r.SIZE, resume=Resume.FUNCTION)
    """Iterations of Sinkhorn and Knopp, each of which normalizes the rows and then the columns of the mixing matrix."""
    mhc_init_gating_factor: float = setting(0.01, r.from_0(1e6), resume=Resume.REPORTED)
    """Initial factor of the part of the weights that depends on the token."""

    @property
    def layer_class(self) -> str:
        """The class of the layers."""
        if not self.enable_mhc_connections:
            return super().layer_class
        return "megatron_core.features.hyper_connections.layer:HyperConnectedLayer"

    @property
    def stream_size(self) -> int:
        """Channels of a token between layers: those of all streams."""
        return super().stream_size * (self.mhc_num_residual_streams if self.enable_mhc_connections else 1)

    @property
    def connection_weights(self) -> int:
        """Weights of a connection for one token: n to read, n to write, and n x n to mix n streams."""
        return self.mhc_num_residual_streams * (self.mhc_num_residual_streams + 2)

    @property
    def connection_elements(self) -> tuple[int, int]:
        """A projection to the weights; their biases and three factors."""
        if not self.enable_mhc_connections:
            return super().connection_elements
        return self.connection_weights * self.stream_size, self.connection_weights + 3


def has_connections(config: RunConfig) -> bool:
    """Whether the layers of a run have hyper-connections."""
    return config.model.section(HyperConnectionsConfig).enable_mhc_connections


def connection_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that need one stream, and stages that would send or receive one."""
    if not has_connections(config):
        return
    for name, reason in REFUSED.items():
        if value := config.optional(name):
            yield f"{name}={value} cannot be used with enable_mhc_connections=True: {reason}; remove one of them"
    layout = config.optional("pipeline_model_parallel_layout")
    # The first layer copies the embedding to the streams, and the last one joins them: no other stage can.
    if layout is not None and not _ends_have_layers(config):
        yield (
            f"pipeline_model_parallel_layout={layout} has no layer in the first or in the last stage, which "
            "enable_mhc_connections=True needs there; move a t to it"
        )
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"):
        if config.optional(name):
            yield f"{name}=True can leave a stage without the layer that enable_mhc_connections=True needs; remove it"


def _ends_have_layers(config: RunConfig) -> bool:
    """Whether a layout has layers in the first and in the last stage, or a fault, which another rule reports."""
    parallel = config.parallel
    try:
        stages = parallel.pipeline_model_parallel_size * parallel.num_chunks(config.model.num_layers)
        layers = layers_by_stage(config, 0, stages)
    except MegatronError:
        return True
    return bool(layers[0] and layers[-1])
