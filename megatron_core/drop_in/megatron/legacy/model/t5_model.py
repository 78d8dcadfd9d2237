"""A T5 of ``megatron.legacy``, which is not supported."""

from torch import nn

from megatron.core.unsupported import Unsupported


class T5Model(Unsupported, nn.Module):
    """A T5 of ``megatron.legacy``."""

    message = "T5 of megatron.legacy is not supported; use a GPT, or train T5 with megatron_core.initialize"
