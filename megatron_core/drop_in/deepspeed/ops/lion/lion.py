"""Lion as settings of an engine."""

from collections.abc import Iterable
from typing import Any

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
