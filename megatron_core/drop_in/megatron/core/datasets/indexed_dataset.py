"""Token files, their dtypes and their builder."""

from pathlib import Path

from megatron_core.datasets.indexed import (
    DType,
    IndexedDataset,
    get_bin_path,
    get_idx_path,
    read_index,
)
from megatron_core.preprocess.builder import IndexedDatasetBuilder


class _IndexReader:
    """The arrays of an index file; Megatron's tools count sequences and documents with it."""

    def __init__(self, idx_path: str, multimodal: bool) -> None:
        index = read_index(Path(idx_path), multimodal, mmap=True)
        self.dtype, self.dtype_size = index.dtype, DType.size(index.dtype)
        self.sequence_lengths, self.sequence_pointers = index.sequence_lengths, index.sequence_pointers
        self.document_indices, self.sequence_modes = index.document_indices, index.sequence_modes
        self.sequence_count, self.document_count = len(index.sequence_lengths), len(index.document_indices)
