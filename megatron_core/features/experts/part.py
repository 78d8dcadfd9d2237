"""Updates of the biases by which routers choose experts."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron_core.features.experts.router import TopKRouter
from megatron_core.ops.rows import copied_to
from megatron_core.training.driver import StepOutcome
from megatron_core.training.parts import RunPart


class BiasUpdates(RunPart):
    """Updates the biases after each step that is not skipped."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def after_step(self, outcome: StepOutcome) -> None:
        """Update the biases of the routers that are trained."""
        # Frozen routers keep their biases: the other weights of the model are those that the biases balance.
        modules = (module for stage in self.run.stages.values() for module in stage.modules())
        routers = [module for module in modules if isinstance(module, TopKRouter) and module.weight.requires_grad]
        if outcome.expert_load and not outcome.skipped:
            update_expert_biases(routers, {layer: load[:-1] for layer, load in outcome.expert_load.items()})
            update_quantile_biases(routers)
        for router in routers:
            if router.qb_beta is not None:
                router.balancing_biases.reset()


def update_quantile_biases(modules: Iterable[nn.Module]) -> None:
    """Update the biases of quantile_balancing of the routers in ``modules``; a collective call of a stage's ranks."""
    for router in modules:
        if isinstance(router, TopKRouter) and router.qb_beta is not None:
            memory = router.config.moe_router_quantile_balancing_ema
            router.balancing_biases.update(router.qb_beta, memory, router.batch_group)


@torch.no_grad()
def update_expert_biases(modules: Iterable[nn.Module], loads: Mapping[int, Sequence[int]]) -> None:
    """Increase the bias of experts with less than the mean load of the global batch, and decrease the other biases.

    bias_e += rate sign(mean(n) - n_e), once per step (Wang et al. 2024, algorithm 1). ``loads``: number of choices of
    each expert, by layer, equal on all ranks.
    """
    for router in (module for root in modules for module in root.modules() if isinstance(module, TopKRouter)):
        if router.expert_bias is not None:
            applied = [loads[number] for number in router.applications]
            # The same on all ranks, so replicas of the bias stay equal without a broadcast.
            load = copied_to(applied, torch.float64, router.expert_bias.device).sum(0)
            rate = router.config.moe_router_bias_update_rate
            router.expert_bias.add_((load.mean() - load).sign().float(), alpha=rate)
