"""LAMB as settings of an engine."""

from collections.abc import Iterable
from typing import Any

from deepspeed.ops.settings import SettingsOptimizer
from megatron_core.errors import ConfigError


class FusedLamb(SettingsOptimizer):
    """LAMB (You et al. 2020) with equal betas in all parameter groups."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        others = {"eps_inside_sqrt": eps_inside_sqrt, "amsgrad": amsgrad}
        if given := [name for name, value in {**others, "max_grad_norm": max_grad_norm}.items() if value]:
            raise ConfigError(f"FusedLamb: {', '.join(given)} is not supported; remove it")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.coefficients, self.bias_correction = (max_coeff, min_coeff), bias_correction

    def settings(self) -> dict[str, Any]:
        """Return settings of ``megatron_core.initialize``."""
        given = self.defaults
        return {
            "optimizer": "lamb",
            "lr": given["lr"],
            "weight_decay": given["weight_decay"],
            "adam_beta1": given["betas"][0],
            "adam_beta2": given["betas"][1],
            "adam_eps": given["eps"],
            "lamb_max_coeff": self.coefficients[0],
            "lamb_min_coeff": self.coefficients[1],
            "lamb_bias_correction": "rate" if self.bias_correction else "none",
        }
