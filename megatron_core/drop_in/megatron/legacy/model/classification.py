"""A classifier of ``megatron.legacy``, which is not supported."""

from torch import nn

from megatron.core.unsupported import Unsupported


class Classification(Unsupported, nn.Module):
    """A BERT with a head for classes."""

    message = "BERT of megatron.legacy is not supported; train a classifier with megatron_core.initialize"
