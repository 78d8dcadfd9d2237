"""The loss of ModelOpt's distillation."""

from typing import Any, NoReturn

from megatron.post_training.utils import refuse_modelopt


def loss_func(loss_mask: Any, output_tensor: Any, model: Any = None) -> NoReturn:
    """Raise ConfigError: ModelOpt is not supported."""
    refuse_modelopt("post_training.loss_func.loss_func")
