"""``DeepSpeedCPUAdagrad`` as ``torch.optim.Adagrad``."""

from collections.abc import Iterable
from typing import Any

import torch

from megatron_core.errors import ConfigError


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Adagrad without decay of the learning rate; ``amsgrad`` has no meaning for it."""

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise ConfigError("DeepSpeedCPUAdagrad: amsgrad=True is not supported; remove it")
        super().__init__(model_params, lr=lr, weight_decay=weight_decay, eps=eps)
