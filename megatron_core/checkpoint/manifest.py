"""The manifest of a checkpoint: its contents, their locations and file hashes; described in docs/checkpoints.md.

Nothing in it depends on the layout: tensors have global names and shapes, and boxes locate their parts in files.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from xxhash import xxh3_128

from megatron_core.checkpoint.boxes import Box
from megatron_core.checkpoint.hashes import HASH, StoredFile, inside, write_file
from megatron_core.errors import CheckpointError, shortened

FORMAT, VERSION = "megatron-native", 2
MANIFEST = "manifest.json"
TORCH_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool},
}
"""Torch dtypes by their names in the format."""
WEIGHT_DTYPES = {name: dtype for name, dtype in TORCH_DTYPES.items() if dtype.is_floating_point}
"""Torch dtypes of weights by their names in the format."""
CHECKSUM = b',\n "checksum": "'
"""The last key of the file: a hash of all preceding bytes."""
T = TypeVar("T")


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor and its location in a file."""

    file: str
    key: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box without its location."""
        return Box(self.start, self.stop)


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Manifest:
    """Counters and configuration (``state``), the tensors by name, and the files."""

    iteration: int
    save_id: str
    """A unique id of the save, stored in all of its files."""
    state: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    files: Mapping[str, StoredFile] = field(default_factory=dict)

    @cached_property
    def files_of_tensors(self) -> set[str]:
        """The files that contain tensors."""
        return {box.file for tensor in self.tensors.values() for box in tensor.boxes}

    def write(self, path: Path) -> None:
        """Write as JSON, flushed to disk."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "save_id": self.save_id,
            "state": dict(self.state),
            "files": {name: {"bytes": file.size, HASH: file.hash} for name, file in sorted(self.files.items())},
            "tensors": {name: _entry(tensor) for name, tensor in sorted(self.tensors.items())},
        }
        # The checksum is the last key and covers the bytes before it: a reader needs no canonical form of JSON to
        # compare it.
        text = json.dumps(content, indent=1).encode().removesuffix(b"\n}")
        write_file(path, text + CHECKSUM + _checksum(text) + b'"\n}')

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read and validate a manifest. Errors: ``CheckpointError``."""
        try:
            data = path.read_bytes()
            content = json.loads(data, object_pairs_hook=_without_duplicates)
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{path.parent} is not a checkpoint: it has no {path.name}") from None
        except RecursionError:
            raise CheckpointError(f"{path} cannot be read as a checkpoint's manifest: nested too deeply") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as a checkpoint's manifest: {_short(error)}") from None
        # Format and version come before the checksum, which another version may compute differently.
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            top = content if isinstance(content, dict) else {}
            raise CheckpointError(
                f"{path} says format {_short(repr(top.get('format')))} version {_short(repr(top.get('version')))}; "
                f"this release reads {FORMAT!r} version {VERSION}"
            )
        text, _, checksum = data.rpartition(CHECKSUM)
        if checksum != _checksum(text) + b'"\n}':
            raise CheckpointError(f"{path} is damaged: its checksum differs")
        try:
            return cls._of(content, path.parent)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: {_short(error)}") from None

    @classmethod
    def _of(cls, content: dict[str, Any], folder: Path) -> "Manifest":
        """Build a manifest from JSON ``content``; ``ValueError`` for the first invalid entry."""
        iteration = _number(content, "iteration")
        # The folder's name is how a run chooses an iteration; renamed by hand, it would resume with other counters.
        named = re.fullmatch(r"iter_(\d{7,})", folder.name)
        if named and int(named[1]) != iteration:
            raise ValueError(f"it is of iteration {iteration}, but in {folder.name}")
        files = {}
        for name, entry in _of_type(content, "files", dict).items():
            inside(folder, name)
            file = _of_type({name: entry}, name, dict)
            files[name] = StoredFile(_number(file, "bytes"), _of_type(file, HASH, str))
        tensors = {n: _tensor(n, entry, files) for n, entry in _of_type(content, "tensors", dict).items()}
        state = _of_type(content, "state", dict)
        save_id = _of_type(content, "save_id", str)
        if state.get("iteration", iteration) != iteration:
            raise ValueError(f"its iteration is {iteration} and {_short(repr(state['iteration']))}")
        return cls(iteration, save_id, state, tensors, files)


def _checksum(text: bytes) -> bytes:
    return xxh3_128(text).hexdigest().encode()


def _short(text: object) -> str:
    return shortened(" ".join(str(text).split()))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    # json would keep the last of two equal keys; readers that keep the first would see another checkpoint.
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return entries


def _of_type(entry: Mapping[str, Any], name: str, expected: type[T]) -> T:
    value = entry.get(name)
    if type(value) is not expected:  # isinstance would accept True as an int
        raise ValueError(f"{name} is {_short(repr(value))}, not of type {expected.__name__}")
    return value


def _number(entry: Mapping[str, Any], name: str) -> int:
    value = _of_type(entry, name, int)
    # Sizes in torch are signed 64-bit integers.
    if not 0 <= value < 2**63:
        raise ValueError(f"{name} is {_short(value)}, which is out of range")
    return value


def _numbers(entry: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return tuple(_number({name: value}, name) for value in _of_type(entry, name, list))


def _entry(tensor: StoredTensor) -> dict[str, Any]:
    boxes = [{"file": b.file, "key": b.key, "start": b.start, "stop": b.stop} for b in tensor.boxes]
    return {"shape": tensor.shape, "dtype": tensor.dtype, "boxes": boxes}


def _tensor(name: str, entry: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    entry = _of_type({name: entry}, name, dict)
    shape = _numbers(entry, "shape")
    dtype = _of_type(entry, "dtype", str)
    boxes = []
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"{name} has the dtype {_short(repr(dtype))}; known: {', '.join(sorted(TORCH_DTYPES))}")
    for item in _of_type(entry, "boxes", list):
        item = _of_type({f"a box of {name}": item}, f"a box of {name}", dict)
        box = StoredBox(
            _of_type(item, "file", str),
            _of_type(item, "key", str),
            _numbers(item, "start"),
            _numbers(item, "stop"),
        )
        within = len(box.start) == len(box.stop) == len(shape) and all(
            a <= b <= size for a, b, size in zip(box.start, box.stop, shape, strict=True)
        )
        if not within:
            raise ValueError(f"a box of {name} is outside its shape {list(shape)}")
        if box.file not in files:
            raise ValueError(f"{name} is stored in {_short(repr(box.file))}, which is not among the files")
        boxes.append(box)
    stored = sum(box.box.numel for box in boxes)
    if stored != prod(shape):
        raise ValueError(f"{stored} of {prod(shape)} elements of {name} are stored")
    return StoredTensor(shape, dtype, tuple(boxes))


def box_key(name: str, box: Box) -> str:
    """The key of a box in its file: the tensor's name and the start of the box."""
    return f"{name}@{','.join(map(str, box.start))}"


def collect(
    folder: Path,
    iteration: int,
    save_id: str,
    state: Mapping[str, Any],
    reports: Iterable[Mapping[str, Any]],
    files: Mapping[str, StoredFile],
) -> Manifest:
    """The manifest of ``files`` in ``folder``, with the boxes in the ranks' ``reports``; every element of every tensor
    must be stored exactly once."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    boxes: dict[str, list[StoredBox]] = {}
    for report in reports:
        shapes |= {tensor: tuple(shape) for tensor, shape in report["shapes"].items()}
        for key, dtype, shape in report["boxes"]:
            tensor, _, where = key.rpartition("@")
            start = tuple(int(i) for i in where.split(",")) if where else ()
            stop = tuple(a + n for a, n in zip(start, shape, strict=True))
            dtypes[tensor] = dtype
            boxes.setdefault(tensor, []).append(StoredBox(report["name"], key, start, stop))
    # Each element has one owning rank, so boxes do not overlap, and their total shows whether an element is missing.
    for tensor, located in boxes.items():
        stored = sum(box.box.numel for box in located)
        if stored != prod(shapes[tensor]):
            raise CheckpointError(
                f"{folder}: {tensor} has {prod(shapes[tensor])} elements, but the ranks wrote {stored}; the checkpoint "
                "was not completed"
            )
    tensors = {name: StoredTensor(shapes[name], dtypes[name], tuple(located)) for name, located in boxes.items()}
    return Manifest(iteration, save_id, state, tensors, files)
