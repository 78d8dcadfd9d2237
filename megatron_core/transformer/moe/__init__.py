"""Mixture of experts: a router chooses experts for each token; a dispatcher sends tokens to experts and back."""

from megatron_core.transformer.moe.layer import MoELayer, moe_loss_names
from megatron_core.transformer.moe.router import Routing, TopKRouter, update_expert_biases
