"""Settings of activations that backward recomputes, or that wait in the host's memory."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import Resume, given, section, setting

RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FREE)
class RecomputeConfig:
    """Activations that are not stored on the device between forward and backward."""

    recompute_granularity: Literal["full", "selective"] | None = setting(None, when=c.TRAINING)
    """Activations that backward recomputes. full: of whole layers. selective: of --recompute-modules."""
    recompute_modules: tuple[RecomputeModule, ...] = setting(
        ("core_attn",), needs=c.SELECTIVE_RECOMPUTE, is_refinement=True
    )
    """Parts of a layer for selective recompute. core_attn: attention without its projections. layernorm: norms before
    attention and MLP. mla_up_proj: queries, keys and values from their latents. mlp, moe, shared_experts: these
    modules as a whole. moe_act: the activation function of experts."""
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, needs=c.FULL_RECOMPUTE, aliases="activations_checkpoint_method", is_refinement=True
    )
    """With full recompute. uniform: keep the input of every --recompute-num-layers layers. block: recompute the first
    --recompute-num-layers layers of each stage."""
    recompute_num_layers: int | None = setting(
        None,
        r.COUNT,
        needs=c.FULL_RECOMPUTE,
        aliases="activations_checkpoint_num_layers checkpoint_num_layers",
        is_refinement=True,
    )
    """uniform: number of layers between stored inputs. block: number of recomputed layers of each stage."""
    cpu_offloading: bool = setting(False, when=c.GPU)
    """Move activations to the host's memory between forward and backward; needs --cpu-offloading-num-layers."""
    cpu_offloading_num_layers: int = setting(0, r.COUNT_FROM_0, when=given("cpu_offloading"))
    """Number of first layers of each stage with offloaded activations (with full recompute: stored inputs)."""

    def recomputes(self, module: str) -> bool:
        """Whether backward recomputes ``module``, one of ``--recompute-modules``."""
        return self.recompute_granularity == "selective" and module in self.recompute_modules
