"""The manifest of a checkpoint, and the folder layout around it.

    SAVE/latest_checkpointed_iteration.txt        the newest complete iteration
    SAVE/iter_0000100/manifest.json               counters, configuration, and for each tensor its boxes
    SAVE/iter_0000100/rank_00000.safetensors      the boxes that rank 0 owned when it was written
    SAVE/iter_0000100/tokenizer/                  the tokenizer's files

Nothing in it depends on the layout: tensors have global names and shapes, and boxes say which part lies in which file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from megatron_core.checkpoint.boxes import Box
from megatron_core.errors import CheckpointError

VERSION = 1
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor and where it is stored."""

    file: str
    key: str
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The box itself."""
        return Box(self.start, self.stop)


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class Manifest:
    """Counters and configuration (``state``), and the tensors by name."""

    state: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write as JSON."""
        tensors = {name: asdict(tensor) for name, tensor in sorted(self.tensors.items())}
        content = {
            "format": "megatron-native",
            "version": VERSION,
            "state": dict(self.state),
            "tensors": tensors,
        }
        path.write_text(json.dumps(content, indent=1))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read what ``write`` wrote."""
        try:
            content = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read as a checkpoint's manifest: {error}") from None
        if content.get("format") != "megatron-native" or content.get("version") != VERSION:
            raise CheckpointError(
                f"{path} says format {content.get('format')!r} version {content.get('version')!r}; this release reads "
                f"'megatron-native' version {VERSION}"
            )
        tensors = {name: _stored(entry) for name, entry in content["tensors"].items()}
        return cls(content["state"], tensors)


def _stored(entry: Mapping[str, Any]) -> StoredTensor:
    boxes = tuple(StoredBox(b["file"], b["key"], tuple(b["start"]), tuple(b["stop"])) for b in entry["boxes"])
    return StoredTensor(tuple(entry["shape"]), entry["dtype"], boxes)


def box_key(name: str, box: Box) -> str:
    """The key of a box in its file: the tensor's name and where the box begins."""
    return f"{name}@{','.join(map(str, box.start))}"


def collect(folder: Path, state: Mapping[str, Any]) -> Manifest:
    """The manifest of the files in ``folder``, from their headers; every tensor must be stored exactly once."""
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    boxes: dict[str, list[StoredBox]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(shape) for name, shape in json.loads(file.metadata()["shapes"]).items()}
            for key in file.keys():  # noqa: SIM118 (not a dict)
                name, _, where = key.rpartition("@")
                part = file.get_slice(key)
                start = tuple(int(i) for i in where.split(",")) if where else ()
                stop = tuple(a + n for a, n in zip(start, part.get_shape(), strict=True))
                dtypes[name] = part.get_dtype()
                boxes.setdefault(name, []).append(StoredBox(path.name, key, start, stop))
    for name, parts in boxes.items():
        stored = sum(part.box.numel for part in parts)
        if stored != prod(shapes[name]):
            raise CheckpointError(
                f"{folder}: {name} has {prod(shapes[name])} elements, but the ranks wrote {stored}; the checkpoint was "
                "not completed"
            )
    tensors = {name: StoredTensor(shapes[name], dtypes[name], tuple(parts)) for name, parts in boxes.items()}
    return Manifest(state, tensors)


def iteration_folder(save: Path, iteration: int) -> Path:
    """The folder of one iteration's checkpoint."""
    return save / f"iter_{iteration:07d}"


def find_checkpoint(load: str, step: int | None = None) -> Path | None:
    """The folder to load: that of ``step``, or of the newest complete iteration; None if there is none.

    ``load`` may also be the folder of one iteration itself.
    """
    root = Path(load)
    if (root / MANIFEST).is_file():
        return root
    if step is None:
        tracker = root / TRACKER
        if not tracker.is_file():
            return None
        text = tracker.read_text().strip()
        if not text.isdigit():
            raise CheckpointError(f"{tracker} holds {text!r} instead of an iteration number; name one with --ckpt-step")
        step = int(text)
    folder = iteration_folder(root, step)
    if not (folder / MANIFEST).is_file():
        there = ", ".join(sorted(p.parent.name for p in root.glob(f"iter_*/{MANIFEST}"))) or "none"
        raise CheckpointError(f"{folder} is no complete checkpoint; complete ones in {root}: {there}")
    return folder
