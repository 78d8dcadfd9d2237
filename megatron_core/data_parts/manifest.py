"""The list of the parts of a token file, `PREFIX.parts.json`.

    {"format": "megatron-native token file of parts 1", "dtype": "uint16",
     "parts": [["corpus.parts/0a1b/text_document", sequences, documents, tokens], ...]}

The parts are pairs in or below the folder of the list, which are read one after another as one file; copies of the
whole folder, also in object storage, work without changes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_core.datasets.indexed import DType
from megatron_core.errors import DataError
from megatron_core.locations import location

FORMAT = "megatron-native token file of parts 1"
_AGAIN = "prepare the data again, or write the list again with megatron-merge-datasets --keep-parts"


@dataclass(frozen=True)
class PartEntry:
    """A part: path prefix relative to the list's folder, and counts."""

    path: str
    sequences: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class PartList:
    """The parts in order, and the dtype of their tokens."""

    dtype: str
    parts: tuple[PartEntry, ...]

    def encoded(self) -> bytes:
        """The content of the file."""
        rows = [[shard.path, shard.sequences, shard.documents, shard.tokens] for shard in self.parts]
        return json.dumps({"format": FORMAT, "dtype": self.dtype, "parts": rows}).encode("utf-8") + b"\n"


def get_parts_path(path_prefix: str) -> str:
    """Path of the list."""
    return f"{path_prefix}.parts.json"


def read_parts(path_prefix: str) -> PartList:
    """The list of a prefix. DataError: another file, a missing field, or a part outside of the list's folder."""
    path = location(get_parts_path(path_prefix))
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, expected {FORMAT!r}")
        shards = tuple(_entry(row) for row in content["parts"])
        listed = PartList(content["dtype"], shards)
        if listed.dtype not in DType.__members__ or not shards:
            raise ValueError(f"dtype {listed.dtype!r} and {len(shards)} parts")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is not a list of parts of a token file ({error}); {_AGAIN}") from None
    return listed


def _entry(row: Sequence[Any]) -> PartEntry:
    path, *counts = row
    inside = isinstance(path, str) and not PurePosixPath(path).is_absolute() and ".." not in PurePosixPath(path).parts
    if not inside or "\\" in path or "://" in path:
        raise ValueError(f"part {path!r} is not in the folder of the list")
    if len(counts) != 3 or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"part {path!r} has the counts {counts}")
    return PartEntry(path, *counts)


def relative_to_list(path_prefix: str, shard: str) -> str:
    """The path of a part as in the list of a prefix. DataError: it is not in or below the list's folder."""
    folder = Path(path_prefix).absolute().parent
    try:
        return Path(shard).absolute().relative_to(folder).as_posix()
    except ValueError:
        raise DataError(
            f"{shard} is not in {folder} or a folder below; write the list to a folder above all parts"
        ) from None
