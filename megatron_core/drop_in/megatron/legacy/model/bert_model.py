"""A BERT of ``megatron.legacy``, which is not supported."""

from torch import nn

from megatron.core.unsupported import Unsupported


class BertModel(Unsupported, nn.Module):
    """A BERT of ``megatron.legacy``."""

    message = "BERT of megatron.legacy is not supported; use a GPT, or train BERT with megatron_core.initialize"
