"""Settings of CUDA graphs of layers."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Condition, section, setting, unless, without

CAPTURABLE_LAYERS = unless(
    "--experimental-attention-variant or --hybrid-layer-pattern",
    lambda run: run.model.experimental_attention_variant or run.model.hybrid_layer_pattern,
)
GRAPHS = Condition("--cuda-graph-impl local", lambda run: run.value("cuda_graph_impl") == "local")


@dataclass(frozen=True, kw_only=True)
@section()
class GraphConfig:
    """Launch the kernels of a layer by CUDA graphs."""

    cuda_graph_impl: Literal["none", "local"] = setting(
        "none",
        needs=(without("compile"), without("fp8_format"), CAPTURABLE_LAYERS),
        when=c.TRAINING,
        is_refinement=True,
    )
    """local: launch the kernels of a layer by CUDA graphs, one for each micro-batch in flight."""
    cuda_graph_modules: tuple[Literal["attn", "mlp"], ...] = setting((), when=GRAPHS, aliases="cuda_graph_scope")
    """Parts of layers with CUDA graphs: attention, MLP, each with its norm and residual sum; default: whole layers
    without experts."""
    cuda_graph_warmup_steps: int = setting(3, r.COUNT_FROM_0, when=GRAPHS)
    """Micro-batches that a layer computes without graph before it is captured, at least those of the first step: layers
    are captured between steps."""


def uses_graphs(config: RunConfig) -> bool:
    """Whether a run captures layers."""
    return config.section(GraphConfig).cuda_graph_impl != "none" and not config.training.skip_train
