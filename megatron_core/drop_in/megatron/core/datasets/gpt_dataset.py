"""For Megatron Core's users: `GPTDataset`, samples of a token file as tensors, in Megatron's order."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset, pad_token_id
from megatron.core.datasets.utils import Split
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.loader import restarted_positions
from megatron_core.datasets.megatron_order.build import check_tokens, divide, read_text
from megatron_core.datasets.megatron_order.cache import IndexCache
from megatron_core.datasets.megatron_order.order import OrderOptions, cached_order
from megatron_core.errors import ConfigError


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of `GPTDataset`. ConfigError: one that is needed and missing, or that is not supported here."""

    reset_position_ids: bool | None = None
    """Positions begin again after every end of document. Needed."""
    reset_attention_mask: bool | None = None
    """Attention ends at every end of document. Needed."""
    eod_mask_loss: bool | None = None
    """The label after an end of document does not count. Needed."""
    create_attention_mask: bool = True
    """Samples bring their attention mask."""
    drop_last_partial_validation_sequence: bool = True
    """Leave out a last sample of validation that is short of tokens; otherwise it is filled with padding."""
    add_extra_token_to_sequence: bool = True
    """Samples are cut from L + 1 tokens, so that the last one has its label; otherwise that is padding."""
    object_storage_cache_path: str | None = None
    """Not supported: token files are read from a file system."""
    data_parallel_size: int = 1
    """Accepted, and changes nothing: samples do not depend on the layout."""
    sequence_parallel_size: int = 0
    """Accepted, and changes nothing: samples do not depend on the layout."""
    context_parallel_size: int | None = None
    """Accepted, and changes nothing: samples do not depend on the layout."""
    hybrid_context_parallel: bool = False
    """Not supported."""
    sequences_per_dataset: dict[str, Any] | None = None
    """Accepted, and changes nothing: counts are read from the index files, which are mapped."""
    inter_document_masking: bool = False
    """Not supported; `reset_attention_mask` separates documents."""

    def __post_init__(self) -> None:
        """Check what is needed and what is not supported."""
        super().__post_init__()
        needed = ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ConfigError(f"GPTDatasetConfig needs {', '.join(missing)}")
        for name in ("object_storage_cache_path", "hybrid_context_parallel", "inter_document_masking"):
            if getattr(self, name):
                raise ConfigError(f"GPTDatasetConfig: {name}={getattr(self, name)!r} is not supported; leave it out")


class GPTDataset(MegatronDataset):
    """Samples of L tokens from some sequences of a token file, in Megatron-LM's order for the same seed.

    `document_index`, `sample_index` and `shuffle_index` are those of Megatron-LM. indexed_indices: numbers of the
    sequences to read. num_samples: how many are needed at least; None for one epoch.
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
        """The number of sequences."""
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open the token file of a prefix."""
        return IndexedDataset(str(dataset_path), multimodal=False, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """A sample by its position, or for None one whose labels do not count, to fill up a batch.

        tokens, labels, position_ids: int64 [L]. loss_mask: float32 [L]. attention_mask, unless
        `create_attention_mask` is off: bool [1, L, L], True where the row's token may not see the column's.
        """
        config = self.config
        number = int(self.shuffle_index[0 if idx is None else idx])
        length, extra = config.sequence_length, self._extra_tokens
        text = read_text(self.dataset, self._order, number, length, extra, self._pad_token_id)
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
        """One for all samples where documents are not separated."""
        return _mask(np.zeros(self.config.sequence_length, dtype=np.int64))


def _mask(starts: np.ndarray) -> torch.Tensor:
    """True where row q may not see column k, that is unless start of q <= k <= q: bool [1, L, L]."""
    positions = np.arange(len(starts))
    return torch.from_numpy((positions > positions[:, None]) | (positions < starts[:, None]))[None]


class MockGPTLowLevelDataset:
    """100,000 made-up documents: of 1 to 4,095 tokens, which count up from 1 and end with the tokenizer's `eod`."""

    seed: int = 0
    size: int = 100_000
    max_sequence_length: int = 4096

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        rng = np.random.default_rng(seed=self.seed)
        self.sequence_lengths = rng.integers(1, self.max_sequence_length, size=self.size, dtype=np.int32)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> np.ndarray:
        """The tokens of a document: int64; ids are taken modulo the tokenizer's `vocab_size` where it has one."""
        count = np.arange(1, int(self.sequence_lengths[idx]), dtype=np.int64)
        vocab_size = getattr(self.tokenizer, "vocab_size", None)
        return np.append(count % vocab_size if vocab_size else count, self.tokenizer.eod)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` tokens of a document from token `offset` on (all that are left without a length)."""
        return self[idx][offset:][:length]


class MockGPTDataset(GPTDataset):
    """`GPTDataset` over made-up documents, for a configuration without a blend."""

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The number of documents."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> MockGPTLowLevelDataset:
        """The made-up documents; there is no path."""
        return MockGPTLowLevelDataset(config.tokenizer)
