"""The three indices of Megatron's order of one data set, built or taken from the cache."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from megatron_core.datasets.megatron_order.cache import IndexCache
from megatron_core.datasets.megatron_order.document_index import build_document_index, plan_epochs
from megatron_core.datasets.megatron_order.sample_index import build_sample_index, count_samples
from megatron_core.datasets.megatron_order.shuffle_index import build_shuffle_index


@dataclass(frozen=True)
class OrderOptions:
    """All that the order of one data set depends on beside its documents.

    num_samples: how many are needed at least; None for one epoch. extra_tokens: 1 where a sample brings the label of
    its last token, otherwise 0. drop_last_partial: leave out a last sample that is short of tokens.
    """

    sequence_length: int
    num_samples: int | None
    seed: int
    extra_tokens: int = 1
    drop_last_partial: bool = True


@dataclass(frozen=True)
class SampleOrder:
    """Sample i is cut from the text of document_index, from row shuffle_index[i] of sample_index to the next row."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.sample_index) - 1


def build_order(sizes: np.ndarray, documents: Sequence[int] | np.ndarray, options: OrderOptions) -> SampleOrder:
    """Megatron-LM's document, sample and shuffle indices, from one `numpy.random.RandomState(seed)` in that order.

    sizes: int32 [S], tokens of every document of the file. documents: those to read, as numbers below S.
    DataError: they hold no tokens.
    """
    documents = np.asarray(documents, dtype=np.int32)
    num_tokens = int(sizes[documents].sum(dtype=np.int64))
    length, extra = options.sequence_length, options.extra_tokens
    epochs = plan_epochs(num_tokens, length, options.num_samples, extra)
    state = np.random.RandomState(options.seed)
    separate = epochs.samples_before_last is not None
    document_index = build_document_index(documents, epochs.count, state, separate)
    total = count_samples(epochs.count * num_tokens, length, extra, options.drop_last_partial)
    sample_index = build_sample_index(sizes, document_index, length, total, extra)
    shuffle_index = build_shuffle_index(epochs.samples_before_last if separate else total, total, state)
    return SampleOrder(document_index, sample_index, shuffle_index)


def order_key(sizes: np.ndarray, documents: Sequence[int] | np.ndarray, options: OrderOptions) -> dict[str, Any]:
    """All that the three indices are a function of: the options, the documents, and the length of each."""
    documents = np.asarray(documents, dtype=np.int32)
    return {
        **vars(options),
        "num_documents": len(documents),
        "documents": _digest(documents),
        "lengths": _digest(sizes[documents]),
    }


def cached_order(
    cache: IndexCache, name: str, sizes: np.ndarray, documents: Sequence[int] | np.ndarray, options: OrderOptions
) -> SampleOrder:
    """`build_order` through a cache; `name` begins the files' names in it, after the key."""
    if not cache.in_use:
        return build_order(sizes, documents, options)
    key = order_key(sizes, documents, options)
    arrays = [field.name for field in fields(SampleOrder)]
    return SampleOrder(**cache.get(name, key, arrays, lambda: vars(build_order(sizes, documents, options))))


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).astype("<i4", copy=False).data).hexdigest()
