"""Lion, by itself or as settings of an engine."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deepspeed.ops.settings import SettingsOptimizer


class FusedLion(SettingsOptimizer):
    """Lion with equal betas in all parameter groups."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights without an engine (Chen et al. 2023, algorithm 2); return the result of ``closure``.

        w = (1 - lr * weight_decay) * w - lr * sign(beta1 * m + (1 - beta1) * g); m = beta2 * m + (1 - beta2) * g.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                direction = momentum.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)
        return loss

    def settings(self) -> dict[str, Any]:
        """Return settings of ``megatron_core.initialize``."""
        beta1, beta2 = self.defaults["betas"]
        common = {"lr": self.defaults["lr"], "weight_decay": self.defaults["weight_decay"]}
        return {"optimizer": "lion", "lion_beta1": beta1, "lion_beta2": beta2, **common}


class DeepSpeedCPULion(FusedLion):
    """The same; ``zero_optimization.offload_optimizer`` decides about the place of its state."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)
