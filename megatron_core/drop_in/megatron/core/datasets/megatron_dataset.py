"""The base class of data sets over one file."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import Split
from megatron_core.features.megatron_order.build import NO_PAD

LowLevelDataset = Any


@dataclass(eq=False)
class MegatronDataset(ABC, torch.utils.data.Dataset):
    """A data set over some elements (`indices`) of a file, for one split: the base of `GPTDataset` and of users'
    classes.

    A subclass defines `__len__`, `__getitem__`, and the two static methods with which the builder opens files.
    num_samples: required number of samples; None for one epoch.
    """

    dataset: LowLevelDataset
    dataset_path: str | None
    indices: np.ndarray
    num_samples: int | None
    index_split: Split
    config: BlendedMegatronDatasetConfig

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Return the number of elements of a file, which `split` divides."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> LowLevelDataset:
        """Open a file."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, Any]:
        """Return sample `idx`."""


def pad_token_id(tokenizer: Any, allow_ambiguous: bool | None) -> int:
    """Return the tokenizer's `pad`; -1, which is not a token, without `pad` or if it equals another special token.

    So a real end of document is never taken for padding; `allow_ambiguous` permits it.
    """
    pad = _attribute(tokenizer, "pad")
    if pad is None:
        return NO_PAD
    named = _attribute(tokenizer, "special_tokens_dict") or {}
    special = [token for name, token in named.items() if name != "pad_token"]
    special = special or [_attribute(tokenizer, "eos"), _attribute(tokenizer, "eod")]
    return NO_PAD if pad in special and not allow_ambiguous else int(pad)


def _attribute(tokenizer: Any, name: str) -> Any:
    """Return an attribute; None if it does not exist or is not implemented."""
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:
        return None
