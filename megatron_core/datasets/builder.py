"""Writing a `.bin`/`.idx` pair, sequence by sequence."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_core.datasets.index_format import get_bin_path
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.datasets.token_writer import BLOCK_BYTES, TokenWriter
from megatron_core.errors import DataError


class IndexedDatasetBuilder:
    """Collects sequences and documents; nothing appears under its name before `finalize`.

    Lengths and documents wait in files beside the tokens, so that memory does not grow with the data.
    As a context manager it removes what it wrote if the block ends without `finalize`.
    """

    def __init__(self, bin_path: str, dtype: npt.DTypeLike = np.int32, multimodal: bool = False) -> None:
        self._writer = TokenWriter(bin_path, dtype, multimodal)
        self._multimodal = multimodal

    def __enter__(self) -> "IndexedDatasetBuilder":
        """The builder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the unfinished files, if they are unfinished."""
        if not self._writer.closed or kind is not None:
            self._writer.discard()

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence [tokens]: numbers that the dtype holds, in anything numpy makes an array of."""
        tokens = self._checked(tensor)
        self._append(tokens, [len(tokens)], [mode])

    def end_document(self) -> None:
        """Close the document that the sequences since the last call make up."""
        self._writer.end_documents(np.array([self._writer.extent.sequences]))

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document whose sequences, of the given lengths, lie back to back in `tensor`."""
        tokens = self._checked(tensor)
        if sum(lengths) != len(tokens):
            raise DataError(f"a document of {len(tokens)} tokens cannot have sequences of {list(lengths)} tokens")
        given = [0] * len(lengths) if modes is None else modes
        if len(given) != len(lengths):
            raise DataError(f"a document of {len(lengths)} sequences cannot have {len(given)} modes")
        self._append(tokens, lengths, given)
        self.end_document()

    def add_documents(self, tensor: Any, lengths: Sequence[int], counts: Sequence[int]) -> None:
        """Append documents back to back in `tensor`: the length of each sequence, the sequences of each document."""
        tokens = self._checked(tensor)
        if sum(lengths) != len(tokens) or sum(counts) != len(lengths):
            raise DataError(
                f"{len(tokens)} tokens cannot be {len(lengths)} sequences of {sum(lengths)} tokens together in "
                f"documents of {sum(counts)} sequences together"
            )
        self._append(tokens, lengths, [0] * len(lengths))
        before = self._writer.extent.sequences - len(lengths)
        self._writer.end_documents(np.cumsum(counts, dtype=np.int64) + before)

    def add_index(self, path_prefix: str) -> None:
        """Append all sequences and documents of another pair of files; DataError if its dtype is another."""
        other = IndexedDataset(path_prefix, multimodal=self._multimodal)
        if np.dtype(other.dtype) != self._writer.dtype:
            raise DataError(
                f"{path_prefix} holds {np.dtype(other.dtype).name} and cannot be appended to "
                f"{self._writer.dtype.name}; prepare both with one tokenizer, or build with the other dtype"
            )
        before = self._writer.extent.sequences
        with open(get_bin_path(path_prefix), "rb") as source:
            while block := source.read(BLOCK_BYTES):
                self._writer.append_tokens(block)
        for start in range(0, len(other), BLOCK_BYTES):
            part = slice(start, start + BLOCK_BYTES)
            modes = None if other.sequence_modes is None else other.sequence_modes[part]
            self._writer.note_sequences(other.sequence_lengths[part], modes)
        for start in range(1, len(other.document_indices), BLOCK_BYTES):
            self._writer.end_documents(other.document_indices[start : start + BLOCK_BYTES] + before)

    def finalize(self, idx_path: str) -> None:
        """Write the index and give both files their names."""
        self._writer.finalize(idx_path)

    @property
    def num_tokens(self) -> int:
        """Tokens appended up to now."""
        return self._writer.extent.tokens

    @property
    def num_documents(self) -> int:
        """Documents closed up to now."""
        return self._writer.extent.documents

    def _append(self, tokens: np.ndarray, lengths: Sequence[int], modes: Sequence[int]) -> None:
        longest = max(lengths, default=0)
        if longest >= 2**31:
            raise DataError(f"a sequence of {longest} tokens: the format counts to {2**31 - 1}; split the document")
        self._writer.append_sequences(tokens, np.array(lengths, np.int64), np.array(modes, np.int64))

    def _checked(self, tensor: Any) -> np.ndarray:
        """The tokens in the file's dtype; a cast alone would wrap numbers around in silence."""
        values = np.asarray(tensor).reshape(-1)
        dtype = self._writer.dtype
        if dtype.kind in "iu" and len(values):
            limits = np.iinfo(dtype)
            low, high = values.min(), values.max()
            if low < limits.min or high > limits.max:
                wrong = int(low if low < limits.min else high)
                raise DataError(
                    f"token id {wrong} does not fit {dtype.name}, which {self._path} is written "
                    "in; build with dtype=DType.optimal_dtype(vocab_size)"
                )
        return np.ascontiguousarray(values.astype(dtype.newbyteorder("<")))

    @property
    def _path(self) -> Path:
        return self._writer.bin_path
