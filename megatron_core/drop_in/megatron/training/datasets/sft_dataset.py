"""Megatron-LM's data set of conversations, which is not supported."""

from typing import Any

from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron_core.errors import ConfigError

_MESSAGE = "SFTDataset is not supported in a program for Megatron-LM; run this package's pretrain_gpt.py with --sft"


class SFTDataset(MegatronDataset):
    """Conversations; creating the data set raises ConfigError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(_MESSAGE)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Raise ConfigError."""
        raise ConfigError(_MESSAGE)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Raise ConfigError."""
        raise ConfigError(_MESSAGE)

    def __len__(self) -> int:
        raise ConfigError(_MESSAGE)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        raise ConfigError(_MESSAGE)
