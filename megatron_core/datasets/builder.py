"""Writing a `.bin`/`.idx` pair, sequence by sequence."""

import shutil
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_core.datasets.aside import aside, publish, writing_aside
from megatron_core.datasets.header import remove_header
from megatron_core.datasets.index_format import Index, get_bin_path, pointers, write_index
from megatron_core.datasets.indexed import IndexedDataset
from megatron_core.errors import DataError


class IndexedDatasetBuilder:
    """Collects sequences and documents; nothing appears under its name before `finalize`.

    As a context manager it removes what it wrote if the block ends without `finalize`.
    """

    def __init__(self, bin_path: str, dtype: npt.DTypeLike = np.int32, multimodal: bool = False) -> None:
        self._bin_path = Path(bin_path)
        self._dtype = np.dtype(dtype)
        self._bin_path.parent.mkdir(parents=True, exist_ok=True)
        self._file = aside(self._bin_path).open("wb")
        # Packed arrays: a list of Python integers would take 36 bytes a sequence.
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b") if multimodal else None

    def __enter__(self) -> "IndexedDatasetBuilder":
        """The builder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the unfinished file, if it is unfinished."""
        if not self._file.closed:
            self._file.close()
            aside(self._bin_path).unlink(missing_ok=True)

    def add_item(self, tensor: Any, mode: int = 0) -> None:
        """Append one sequence [tokens]: numbers that the dtype holds, in anything numpy makes an array of."""
        tokens = self._checked(tensor)
        self._note_sequence(len(tokens), mode)
        self._file.write(tokens.tobytes())

    def end_document(self) -> None:
        """Close the document that the sequences since the last call make up."""
        self._documents.append(len(self._lengths))

    def add_document(self, tensor: Any, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append a document whose sequences, of the given lengths, lie back to back in `tensor`."""
        tokens = self._checked(tensor)
        if sum(lengths) != len(tokens):
            raise DataError(f"a document of {len(tokens)} tokens cannot have sequences of {list(lengths)} tokens")
        for length, mode in zip(lengths, modes or [0] * len(lengths), strict=True):
            self._note_sequence(length, mode)
        self._file.write(tokens.tobytes())
        self.end_document()

    def add_index(self, path_prefix: str) -> None:
        """Append all sequences and documents of another pair of files; DataError if its dtype is another."""
        other = IndexedDataset(path_prefix, multimodal=self._modes is not None)
        if np.dtype(other.dtype) != self._dtype:
            raise DataError(
                f"{path_prefix} holds {np.dtype(other.dtype).name} and cannot be appended to "
                f"{self._dtype.name}; prepare both with one tokenizer, or build with the other dtype"
            )
        before = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.astype(np.int32).tobytes())
        self._documents.frombytes((other.document_indices[1:] + before).astype(np.int64).tobytes())
        if self._modes is not None:
            self._modes.frombytes(other.sequence_modes.astype(np.int8).tobytes())
        with open(get_bin_path(path_prefix), "rb") as source:
            shutil.copyfileobj(source, self._file, 16 << 20)

    def finalize(self, idx_path: str) -> None:
        """Write the index and give both files their names."""
        lengths = np.frombuffer(self._lengths, dtype=np.int32)
        index = Index(
            self._dtype.type,
            lengths,
            pointers(lengths, self._dtype.itemsize),
            np.frombuffer(self._documents, dtype=np.int64),
            None if self._modes is None else np.frombuffer(self._modes, dtype=np.int8),
        )
        # An old index must not be found beside the new tokens, should the machine stop between the two
        # renames; nor an old header, which would vouch for another tokenizer.
        Path(idx_path).unlink(missing_ok=True)
        remove_header(str(idx_path).removesuffix(".idx"))
        publish(self._file, self._bin_path)
        with writing_aside(idx_path) as file:
            write_index(file, index)

    @property
    def num_tokens(self) -> int:
        """Tokens appended up to now."""
        return self._file.tell() // self._dtype.itemsize

    @property
    def num_documents(self) -> int:
        """Documents closed up to now."""
        return len(self._documents) - 1

    def _note_sequence(self, length: int, mode: int) -> None:
        if length >= 2**31:
            raise DataError(f"a sequence of {length} tokens: the format counts to {2**31 - 1}; split the document")
        self._lengths.append(length)
        if self._modes is not None:
            self._modes.append(mode)

    def _checked(self, tensor: Any) -> np.ndarray:
        """The tokens in the file's dtype; a cast alone would wrap numbers around in silence."""
        values = np.asarray(tensor).reshape(-1)
        if self._dtype.kind in "iu" and len(values):
            limits = np.iinfo(self._dtype)
            low, high = values.min(), values.max()
            if low < limits.min or high > limits.max:
                wrong = int(low if low < limits.min else high)
                raise DataError(
                    f"token id {wrong} does not fit {self._dtype.name}, which {self._bin_path} is written "
                    "in; build with dtype=DType.optimal_dtype(vocab_size)"
                )
        return values.astype(self._dtype.newbyteorder("<"))
