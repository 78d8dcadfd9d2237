"""Routers; ``TopKRouter`` has Megatron's arguments."""

from megatron.core.transformer.layer_parts import TopKRouter
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron_core.transformer.moe.router import Router, sinkhorn
