"""``FusedAdam`` and ``DeepSpeedCPUAdam`` as ``torch.optim.Adam``; an engine runs them as its fused AdamW."""

from collections.abc import Iterable
from types import MethodType
from typing import Any, NoReturn

import torch

from megatron_core.errors import ConfigError


class FusedAdam(torch.optim.Adam):
    """Adam with decoupled weight decay, or with ``adam_w_mode=False`` weight decay as a part of the gradient."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)
        self.bias_correction = bias_correction
        if not bias_correction:
            self.step = MethodType(_refuse_step, self)  # type: ignore[method-assign]

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is not a part of the gradient."""
        return bool(self.defaults["decoupled_weight_decay"])

    def settings(self) -> dict[str, Any]:
        """Return settings of ``megatron_core.initialize`` besides those of the class in torch."""
        return {} if self.bias_correction else {"adam_bias_correction": False}


def _refuse_step(optimizer: FusedAdam, closure: Any = None) -> NoReturn:
    raise ConfigError(
        f"{type(optimizer).__name__}(bias_correction=False).step(): torch's Adam corrects the bias; give the optimizer "
        "to deepspeed.initialize and call engine.step()"
    )


class DeepSpeedCPUAdam(FusedAdam):
    """The same; ``zero_optimization.offload_optimizer`` decides about the place of its state."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
