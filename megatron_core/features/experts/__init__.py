"""Mixture of experts: a router chooses experts for each token; a dispatcher sends tokens to experts and back.

The settings of the layout (``expert_model_parallel_size``) and the second view of the ranks are in the core.
"""

from typing import TYPE_CHECKING

from megatron_core.feature import Feature
from megatron_core.features.experts.rules import moe_problems
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.moved import old_names_of

EXPERTS = Feature(
    name="experts",
    settings=MoEConfig,
    is_used=lambda config: config.model.section(MoEConfig).num_experts is not None,
    problems=moe_problems,
    feed_forwards={"experts": "megatron_core.features.experts.sizes:ExpertSizes"},
    layers={"experts": "megatron_core.features.experts.layer:MoELayer"},
    run_part="megatron_core.features.experts.part:BiasUpdates",
)

if not TYPE_CHECKING:
    __getattr__ = old_names_of(__name__)
