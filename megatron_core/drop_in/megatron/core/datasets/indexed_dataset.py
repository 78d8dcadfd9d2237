"""Token files, their dtypes and their builder, and functions that build indices, in numpy instead of C++."""

from pathlib import Path

import numpy as np

from megatron_core.datasets.indexed import DType, IndexedDataset, get_bin_path, get_idx_path, read_index
from megatron_core.features.megatron_order.blend_index import build_blend_index, build_exhaustive_blend_index
from megatron_core.features.megatron_order.order import build_sample_index, count_samples
from megatron_core.preprocess.builder import IndexedDatasetBuilder


class _IndexReader:
    """The arrays of an index file; Megatron's tools count sequences and documents with it."""

    def __init__(self, idx_path: str, multimodal: bool) -> None:
        index = read_index(Path(idx_path), multimodal, mmap=True)
        self.dtype, self.dtype_size = index.dtype, DType.size(index.dtype)
        self.sequence_lengths, self.sequence_pointers = index.sequence_lengths, index.sequence_pointers
        self.document_indices, self.sequence_modes = index.document_indices, index.sequence_modes
        self.sequence_count, self.document_count = len(index.sequence_lengths), len(index.document_indices)


def build_sample_idx(
    sizes: np.ndarray,
    document_indices: np.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> np.ndarray:
    """Return the borders of all samples of `num_epochs` epochs: int32 [samples + 1, 2], int64 if int32 is too small.

    A row is (position in `document_indices`, token of that document).
    """
    extra = int(add_extra_token_to_sequence)
    total = count_samples(num_epochs * tokens_per_epoch, sequence_length, extra, drop_last_partial_sequence)
    return build_sample_index(np.asarray(sizes), np.asarray(document_indices), sequence_length, total, extra)


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: np.ndarray,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill the first `size` entries of the two arrays with the data set and the sample drawn from it.

    verbose: print the requested and the actual fraction of each data set.
    """
    blend = build_blend_index(list(weights[:num_datasets]), size)
    dataset_index[:size] = blend.dataset_index
    dataset_sample_index[:size] = blend.dataset_sample_index
    if verbose:
        for number, drawn in enumerate(blend.counts.tolist()):
            print(f"data set {number}: weight {weights[number]:.6f}, share {drawn / max(1, size):.6f}")


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, sizes: np.ndarray, num_datasets: int
) -> None:
    """Fill the two arrays with every sample of every data set once, in proportion to the sizes."""
    blend = build_exhaustive_blend_index([int(size) for size in sizes[:num_datasets]])
    dataset_index[: len(blend.dataset_index)] = blend.dataset_index
    dataset_sample_index[: len(blend.dataset_index)] = blend.dataset_sample_index
