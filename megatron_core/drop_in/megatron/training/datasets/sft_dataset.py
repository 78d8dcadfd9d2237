"""Megatron-LM's data set of conversations, which is not supported."""

from megatron_core.drop_in.unsupported import Unsupported, unsupported


class SFTDataset(Unsupported):
    """Conversations; opening their file raises ConfigError, too."""

    message = "SFTDataset is not supported in a program for Megatron-LM; run this package's pretrain_gpt.py with --sft"
    numel_low_level_dataset = build_low_level_dataset = staticmethod(unsupported(message))
