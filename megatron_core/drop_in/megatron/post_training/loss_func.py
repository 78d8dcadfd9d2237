"""The loss of ModelOpt's distillation, which is not supported."""

from megatron.core.unsupported import unsupported

loss_func = unsupported("post_training.loss_func.loss_func needs ModelOpt, which is not supported; train without it")
