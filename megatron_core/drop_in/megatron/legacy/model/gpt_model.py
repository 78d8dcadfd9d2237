"""Megatron-LM's models before ``megatron.core``, which are not supported."""

from torch import nn

from megatron.core.unsupported import Unsupported


class GPTModel(Unsupported, nn.Module):
    """A GPT of ``megatron.legacy``."""

    message = "use_legacy_models=True is not supported; use megatron.core.models.gpt.GPTModel"
