"""The losses and the experts' loads that layers add in a loop of the caller's own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.module import mark_keep_in_fp32
from megatron_core.config import ModelConfig
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.transformer.auxiliary_loss import AuxiliaryLosses, MicroBatchAuxiliaryLosses
from megatron_core.transformer.context import LayerContext, SequenceContext
from megatron_core.transformer.moe import TopKRouter, update_expert_biases


class LossCollector(nn.Module):
    """A base class of modules that give their layers a place for losses and for the loads of experts.

    Losses are means over each micro-batch. Loads are summed until ``take_expert_loads``, which is called once a step.
    """

    auxiliary_loss_scale: float | Tensor = 1.0
    """Factor on the gradients of losses that layers add; the schedule sets it to that of the main loss."""
    auxiliary_losses: AuxiliaryLosses | None = None
    """The losses of the last training micro-batch; ``totals`` has their values on this rank."""
    expert_layers: Sequence[int] = ()
    """The numbers of the layers with experts, the same on all stages of a model."""
    _loads: Tensor | None = None
    _latest: AuxiliaryLosses | None = None

    def collect_losses(
        self,
        model: ModelConfig,
        names: tuple[str, ...],
        *,
        sequences: int,
        tokens: Tensor,
        per_token: bool,
        counts: Mapping[str, Tensor] | None = None,
    ) -> MicroBatchAuxiliaryLosses | None:
        """A new place for a micro-batch of ``sequences`` with ``tokens`` that count; None outside of the training and
        where layers add nothing.

        With ``per_token`` the caller divides by all tokens in the end, so that a mean counts once for each token.
        """
        adds = names or (self.expert_layers and model.moe_router_enable_expert_bias)
        if not adds or not self.training or not torch.is_grad_enabled():
            return None
        self._sum_loads(tokens.device)
        self.auxiliary_losses = self._latest = AuxiliaryLosses(
            names,
            sequences=sequences,
            tokens=tokens.clamp_min(1.0),
            counts=dict(counts or {}),
            loss_scale=self.auxiliary_loss_scale * (tokens if per_token else 1.0),
            expert_layers=self.expert_layers,
            num_experts=model.num_experts or 0,
        )
        return self.auxiliary_losses.of_micro_batch(0)

    def with_losses(
        self, layers: LayerContext, names: tuple[str, ...], hidden: Tensor, passed: SequenceContext, *, per_token: bool
    ) -> SequenceContext:
        """``passed`` with a place for the losses of layers that are called alone, with ``hidden`` ``[s, b, h]``."""
        mask = passed.token_mask
        count = hidden.shape[0] * hidden.shape[1] if mask is None else mask.sum(dtype=torch.float64)
        tokens = torch.as_tensor(count, dtype=torch.float64, device=hidden.device)
        for group in (layers.cp.whole, *[layers.tp_group] * layers.sequence_parallel):
            all_reduce_(tokens, group)
        batch = hidden.shape[1]
        place = self.collect_losses(layers.config, names, sequences=batch, tokens=tokens, per_token=per_token)
        return replace(passed, auxiliary_losses=place)

    def _sum_loads(self, device: torch.device) -> None:
        """Add the load of the last micro-batch, whose forward is over, to the sum."""
        if self._latest is not None and self.expert_layers:
            load = self._latest.expert_load(device)[:, :-1]
            self._loads = load if self._loads is None else self._loads + load
        self._latest = None

    def take_expert_loads(self, num_experts: int, device: torch.device) -> Tensor:
        """How often each expert was chosen on this rank since the last call, ``[expert layers, experts]`` float64."""
        self._sum_loads(device)
        taken, self._loads = self._loads, None
        empty = torch.zeros(len(self.expert_layers), num_experts, dtype=torch.float64, device=device)
        return empty if taken is None else taken


def keep_expert_biases_in_fp32(module: nn.Module) -> None:
    """Mark the biases of experts, so that ``Float16Module`` leaves them in float32."""
    for router in module.modules():
        bias: Any = router.expert_bias if isinstance(router, TopKRouter) else None
        if bias is not None:
            mark_keep_in_fp32(bias)


def update_expert_biases_of(modules: Iterable[nn.Module], group: Group) -> None:
    """Move the biases of experts by the loads since the last call, summed over ``group``; only of modules in training.

    bias_e += rate sign(mean load - load_e) (Wang et al. 2024, algorithm 1).
    """
    done = set[nn.Module]()
    for module in modules:
        if not isinstance(module, LossCollector) or not module.training:
            continue
        routers = [each for each in module.modules() if isinstance(each, TopKRouter) and each.expert_bias is not None]
        if routers and done.isdisjoint(routers):
            done.update(routers)
            bias: Any = routers[0].expert_bias
            loads = module.take_expert_loads(bias.numel(), bias.device)
            all_reduce_(loads, group)
            update_expert_biases([module], dict(zip(module.expert_layers, loads.tolist(), strict=True)))
