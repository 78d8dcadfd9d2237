"""`GPTDataset`: samples of a token file as tensors, in Megatron's order."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import (
    BlendedMegatronDatasetConfig,
    MegatronDataset,
    Split,
    pad_token_id,
)
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.loader import restarted_positions
from megatron_core.errors import ConfigError
from megatron_core.features.megatron_order.build import check_tokens, divide, read_sample
from megatron_core.features.megatron_order.cache import IndexCache
from megatron_core.features.megatron_order.mock import MockSequences
from megatron_core.features.megatron_order.order import OrderOptions, cached_order


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of `GPTDataset`. Raises ConfigError if a required setting is missing or a setting is not supported."""

    reset_position_ids: bool | None = None
    """Restart positions after every end of document. Required."""
    reset_attention_mask: bool | None = None
    """Attend within documents only. Required."""
    eod_mask_loss: bool | None = None
    """Exclude the label after an end of document from the loss. Required."""
    create_attention_mask: bool = True
    """Add an attention mask to each sample."""
    drop_last_partial_validation_sequence: bool = True
    """Omit an incomplete last sample of validation instead of padding it."""
    add_extra_token_to_sequence: bool = True
    """Read L + 1 tokens for a sample, so that the last token has a label; otherwise its label is padding."""
    object_storage_cache_path: str | None = None
    """Not supported: token files are read from a file system."""
    data_parallel_size: int = 1
    """No effect: samples do not depend on the layout."""
    sequence_parallel_size: int = 0
    """No effect: samples do not depend on the layout."""
    context_parallel_size: int | None = None
    """No effect: samples do not depend on the layout."""
    hybrid_context_parallel: bool = False
    """Not supported."""
    sequences_per_dataset: dict[str, Any] | None = None
    """No effect: counts are read from the mapped index files."""
    inter_document_masking: bool = False
    """Not supported; `reset_attention_mask` separates documents."""

    def __post_init__(self) -> None:
        """Check required and unsupported settings."""
        super().__post_init__()
        needed = ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"GPTDatasetConfig needs {', '.join(missing)}")
        for name in ("object_storage_cache_path", "hybrid_context_parallel", "inter_document_masking"):
            if getattr(self, name):
                raise ConfigError(f"GPTDatasetConfig: {name}={getattr(self, name)!r} is not supported; remove it")


class GPTDataset(MegatronDataset):
    """Samples of L tokens from some sequences of a token file, in Megatron-LM's order for the same seed.

    `document_index`, `sample_index` and `shuffle_index` equal Megatron-LM's. indexed_indices: the numbers of the
    sequences to read. num_samples: required number of samples; None for one epoch.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self._pad_token_id = pad_token_id(config.tokenizer, config.allow_ambiguous_pad_tokens)
        self._extra_tokens = int(config.add_extra_token_to_sequence)
        options = OrderOptions(
            config.sequence_length,
            num_samples,
            config.random_seed,
            self._extra_tokens,
            index_split is not Split.valid or config.drop_last_partial_validation_sequence,
        )
        sizes = indexed_dataset.sequence_lengths
        check_tokens(str(dataset_path), index_split.name, sizes[indexed_indices], options)
        name = f"{type(self).__name__}-{index_split.name}"
        self._order = cached_order(IndexCache(config.path_to_cache), name, sizes, indexed_indices, options)
        self.document_index = self._order.document_index
        self.sample_index = self._order.sample_index
        self.shuffle_index = self._order.shuffle_index

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of sequences."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open the token file of a prefix."""
        return IndexedDataset(str(dataset_path), multimodal=False, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return sample `idx`; for None a sample whose labels do not count, to fill a batch.

        tokens, labels, position_ids: int64 [L]. loss_mask: float32 [L]. attention_mask, with `create_attention_mask`:
        bool [1, L, L], True if the token of the row must not see the token of the column.
        """
        config = self.config
        number = int(self.shuffle_index[0 if idx is None else idx])
        length, extra = config.sequence_length, self._extra_tokens
        text = read_sample(self.dataset, self._order, number, length, extra, self._pad_token_id)
        masked = config.tokenizer.eod if config.eod_mask_loss else None
        sample = divide(text, extra, self._pad_token_id, masked)
        text, sample = self._rearrange(0 if idx is None else idx, text[:length], sample)
        if idx is None:
            sample["loss_mask"][:] = 0.0
        item = {name: torch.from_numpy(array) for name, array in sample.items()}
        positions = np.arange(length)
        separate = config.reset_position_ids or config.reset_attention_mask
        own = restarted_positions(text[None], config.tokenizer.eod)[0] if separate else positions
        item["position_ids"] = torch.from_numpy(own if config.reset_position_ids else positions)
        if config.create_attention_mask:
            item["attention_mask"] = _mask(positions - own) if config.reset_attention_mask else self._causal_mask
        return item

    def _rearrange(self, idx: int, text: np.ndarray, sample: Any) -> tuple[np.ndarray, Any]:
        """Return the tokens [L] and the sample's tokens, labels and loss mask; a subclass rearranges both."""
        return text, sample

    @cached_property
    def _causal_mask(self) -> torch.Tensor:
        """The mask of all samples if documents are not separated."""
        return _mask(np.zeros(self.config.sequence_length, dtype=np.int64))


def _mask(starts: np.ndarray) -> torch.Tensor:
    """Return a mask bool [1, L, L]: False for start of q <= k <= q, else True."""
    positions = np.arange(len(starts))
    return torch.from_numpy((positions > positions[:, None]) | (positions < starts[:, None]))[None]


class MockGPTLowLevelDataset(MockSequences):
    """``MockSequences`` of a tokenizer; ids are not limited if it has no ``vocab_size``."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(getattr(tokenizer, "vocab_size", None) or 2**31, tokenizer.eod)
        self.tokenizer = tokenizer

    def __getitem__(self, idx: int) -> np.ndarray:
        """Return the tokens of a document: int64."""
        return self.get(idx)


class MockGPTDataset(GPTDataset):
    """`GPTDataset` over generated documents, for a configuration without a blend."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of documents."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> MockGPTLowLevelDataset:
        """Return the generated documents; the path is not used."""
        return MockGPTLowLevelDataset(config.tokenizer)
