"""Reading a `.bin`/`.idx` pair: any sequence of tokens, by its number."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_core.datasets.index_format import DType, get_bin_path, get_idx_path
from megatron_core.datasets.index_reader import read_index
from megatron_core.errors import DataError

__all__ = ["DType", "IndexedDataset", "get_bin_path", "get_idx_path"]


class IndexedDataset:
    """The sequences of `PREFIX.bin`, found through `PREFIX.idx`.

    `[i]` and `get(i)` give one sequence, `[a:b]` a list of them; a multimodal set gives (sequence, mode) and
    (sequences, modes). Arrays have the file's dtype and, with `mmap`, are read-only views of the file.
    DataError on opening: a file is missing, is no token file, or is shorter than it says. What would take a pass
    over the index is left to `tools/inspect_dataset.py --validate`, so that thousands of files open in a moment.
    """

    def __init__(self, path_prefix: str, multimodal: bool = False, mmap: bool = True) -> None:
        self.path_prefix = str(path_prefix)
        self._bin = Path(get_bin_path(self.path_prefix))
        _check_presence(self.path_prefix)
        index = read_index(Path(get_idx_path(self.path_prefix)), multimodal, mmap)
        self.dtype = index.dtype
        self.sequence_lengths = index.sequence_lengths
        self.sequence_pointers = index.sequence_pointers
        self.document_indices = index.document_indices
        self.sequence_modes = index.sequence_modes
        self.itemsize = DType.size(self.dtype)
        self._check_bin()
        self._buffer = self._map() if mmap else None

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, index: int | slice) -> Any:
        """One sequence, or the list of sequences of a slice with step 1."""
        if not isinstance(index, slice):
            return self.get(index)
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a slice of a token file needs step 1, found {step}; index the sequences one by one")
        sequences = [self._tokens(i, 0, None) for i in range(start, stop)]
        return sequences if self.sequence_modes is None else (sequences, self.sequence_modes[start:stop])

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """`length` tokens of a sequence from token `offset` on (all that are left without a length)."""
        place = idx + len(self) if idx < 0 else idx
        if not 0 <= place < len(self):
            raise IndexError(f"sequence {idx} of {self.path_prefix}, which has {len(self)}")
        tokens = self._tokens(place, offset, length)
        return tokens if self.sequence_modes is None else (tokens, self.sequence_modes[place])

    def tokens(self, first: int, count: int) -> np.ndarray:
        """`count` tokens of the `.bin` file from its token `first` on, across sequences: [count]."""
        return self._read(first * self.itemsize, count)

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences together."""
        return int(self.sequence_lengths.sum(dtype=np.int64))

    @staticmethod
    def exists(path_prefix: str) -> bool:
        """Whether both files of the prefix are there."""
        return Path(get_idx_path(path_prefix)).is_file() and Path(get_bin_path(path_prefix)).is_file()

    def _tokens(self, index: int, offset: int, length: int | None) -> np.ndarray:
        whole = int(self.sequence_lengths[index])
        if whole < 0:
            raise DataError(
                f"{get_idx_path(self.path_prefix)}: sequence {index} has {whole} tokens, expected >= 0; see what "
                "else is wrong with tools/inspect_dataset.py --validate, then copy the file or prepare the data again"
            )
        count = whole - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > whole:
            raise IndexError(
                f"tokens [{offset}, {offset + count}) of sequence {index} of {self.path_prefix}, which has {whole}"
            )
        # Python integers: the byte position of a token does not fit 32 bits.
        return self._read(int(self.sequence_pointers[index]) + offset * self.itemsize, count)

    def _read(self, place: int, count: int) -> np.ndarray:
        """`count` tokens from byte `place` on."""
        if self._buffer is not None:
            return np.frombuffer(self._buffer, dtype=self.dtype, count=count, offset=place)
        return np.fromfile(self._bin, dtype=self.dtype, count=count, offset=place)

    def _map(self) -> Any:
        # An empty file cannot be mapped.
        return np.memmap(self._bin, dtype=np.uint8, mode="r") if self._bin.stat().st_size else b""

    def _check_bin(self) -> None:
        """Compare the token file's size with what the last sequence that holds tokens needs."""
        last = len(self) - 1
        while last >= 0 and self.sequence_lengths[last] == 0:
            last -= 1
        if last < 0:
            return
        first_byte = int(self.sequence_pointers[last])
        needed = first_byte + int(self.sequence_lengths[last]) * self.itemsize
        if first_byte < 0 or needed < first_byte:
            raise DataError(
                f"{get_idx_path(self.path_prefix)}: sequence {last} begins at byte {first_byte} and has "
                f"{self.sequence_lengths[last]} tokens: the index is damaged; copy it again, or prepare the data again"
            )
        size = self._bin.stat().st_size
        if size < needed:
            raise DataError(
                f"{self._bin} has {size} bytes, expected {needed} from {get_idx_path(self.path_prefix)}: it "
                "is cut off, or the two files are not of one run; copy both again, or prepare the data again"
            )


def _check_presence(path_prefix: str) -> None:
    missing = [p for p in (get_bin_path(path_prefix), get_idx_path(path_prefix)) if not Path(p).is_file()]
    if not missing:
        return
    way_out = "give the path without .bin or .idx, of files that tools/preprocess_data.py wrote"
    if path_prefix.endswith((".bin", ".idx")):
        way_out = f"give the prefix alone, {path_prefix[:-4]}"
    elif Path(get_bin_path(f"{path_prefix}_text_document")).is_file():
        way_out = f"did you mean {path_prefix}_text_document?"
    raise DataError(f"token file {path_prefix}: expected {' and '.join(missing)}, found no such file; {way_out}")
