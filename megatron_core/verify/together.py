"""Sequences whose results depend on each other because they are computed together."""

from enum import Enum, auto

from megatron_core.config.run import RunConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.features.mean_of_means.settings import uses_mean_of_means
from megatron_core.planner.layout import Layout


class Scope(Enum):
    """The sequences that affect each other's results."""

    RANK = auto()
    """Sequences of a micro-batch of a rank."""
    REPLICAS = auto()
    """Sequences of a micro-batch of all replicas."""


def shared_micro_batches(config: RunConfig) -> dict[str, Scope]:
    """Settings with which a result depends on which sequences are computed together, as text."""
    model = config.model.section(MoEConfig)
    balancing = model.balancing_losses
    router = model.moe_router_load_balancing_type
    scopes: dict[str, Scope] = {}
    if model.num_experts is not None:
        if "aux_loss" in balancing:
            scopes["the balancing loss aux_loss"] = Scope.RANK
        if router == "sinkhorn":
            scopes["moe_router_load_balancing_type=sinkhorn"] = Scope.RANK
        if "global_aux_loss" in balancing:
            scopes["the balancing loss global_aux_loss"] = Scope.REPLICAS
    fp8_format = config.section(FP8Config).fp8_format
    if fp8_format is not None:  # scales are those of matrices, or blocks, of a whole micro-batch
        scopes[f"fp8_format={fp8_format}"] = Scope.RANK
    if uses_mean_of_means(config):  # masks of different lengths: another division has other means
        scopes["calculate_per_token_loss=False"] = Scope.RANK
    return scopes


def replicas(config: RunConfig, layout: Layout) -> int:
    """Replicas that train together on each micro-batch."""
    return layout.dp // config.num_groups


def incomparable(config: RunConfig, layout: Layout) -> str | None:
    """Why no run of one process gives what ``layout`` must give; None if there is one."""
    groups = config.model.query_groups if config.model.group_query_attention else 0
    fp8_format = config.section(FP8Config).fp8_format
    if fp8_format is not None and groups % layout.tp:
        # The sum of rounded parts is not the rounded sum; both are results of FP8.
        return (
            f"with num_query_groups={groups} and tp{layout.tp} a rank has only a part of the gradients of keys and "
            f"values, which fp8_format={fp8_format} rounds before they are summed; compare layouts whose tp divides "
            "num_query_groups, or without FP8"
        )
    if uses_mean_of_means(config) and layout.cp > 1:
        return (
            f"with cp{layout.cp} and calculate_per_token_loss=False each rank averages the losses of its own part of a "
            "sequence, which one process does not have; compare layouts with cp1, or add --calculate-per-token-loss"
        )
    scopes = shared_micro_batches(config)
    if replicas(config, layout) == 1 or len(set(scopes.values())) < 2:
        return None
    of_rank, of_replicas = (
        " and ".join(name for name, scope_of_setting in scopes.items() if scope_of_setting == scope)
        for scope in (Scope.RANK, Scope.REPLICAS)
    )
    return (
        f"one process cannot have its micro-batches: {of_rank} is computed for each rank's micro-batch, "
        f"{of_replicas} for those of all dp={layout.dp} replicas together; compare layouts with dp1, or remove one of "
        "the two"
    )
