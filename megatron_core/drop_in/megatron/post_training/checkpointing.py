"""Functions of ModelOpt, which is not supported."""

from megatron.core.unsupported import unsupported

_MESSAGE = "ModelOpt is not supported; train without it"
load_modelopt_checkpoint = unsupported(_MESSAGE)
load_modelopt_state = unsupported(_MESSAGE)
has_modelopt_state = unsupported(_MESSAGE)
