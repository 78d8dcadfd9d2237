"""Outputs of commands and conversions: their kinds, checked before the work starts, and pictures."""

import errno
import io
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.output_file import Kind, Output, make_folder, no_follow, refuse_other_file, refuse_url, starting_with


def json_with(name: str, *keys: str) -> Kind:
    """A JSON object with these keys, or a list of such objects."""

    def accepts(data: bytes) -> bool:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return False
        objects = content if isinstance(content, list) else [content]
        return all(isinstance(entry, dict) and set(keys) <= entry.keys() for entry in objects)

    return Kind(name, accepts)


def json_line_with(name: str, *keys: str) -> Kind:
    """JSON Lines whose first object has exactly these keys."""
    return Kind(name, lambda data: json_keys(data.split(b"\n", 1)[0]) == set(keys))


def json_keys(data: bytes) -> set[str]:
    """The keys of a JSON object; empty for anything else."""
    with suppress(ValueError, RecursionError):
        content = json.loads(data)
        return set(content) if isinstance(content, dict) else set()
    return set()


NEW = Kind("new or empty file", lambda data: False)
"""Files that are never overwritten, because those of other programs look alike."""
_PICTURES = {
    ".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml", ".svgz": b"\x1f\x8b", ".ps": b"%!PS", ".eps": b"%!PS",
    ".jpg": b"\xff\xd8", ".jpeg": b"\xff\xd8", ".tif": b"II*", ".tiff": b"II*", ".webp": b"RIFF", ".gif": b"GIF8",
}  # fmt: skip
_AUTHOR = "megatron-native"
_AUTHOR_KEYS = {".png": "Software", ".pdf": "Creator", ".svg": "Creator", ".ps": "Creator", ".eps": "Creator"}
"""Keys of matplotlib's metadata by which our pictures are recognized; those in other formats are never overwritten."""


def picture_kind(path: str | Path) -> Kind:
    """Pictures of this program in the image format of the suffix of ``path``."""
    suffix = Path(path).suffix.lower()
    magic = _PICTURES.get(suffix)
    return Kind(
        f"{suffix} picture of this program",
        lambda data: magic is not None and data.startswith(magic) and _AUTHOR.encode() in data,
    )


TRACE = starting_with("Chrome trace", b'{"traceEvents"')


def save_picture(figure: Any, path: str | Path, *, dpi: int) -> None:
    """Save a matplotlib figure, as PNG if ``path`` has no suffix. ``ConfigError`` for a file of another kind."""
    path = Path(path) if Path(path).suffix else Path(f"{path}.png")
    suffix = path.suffix.lower()
    metadata = {_AUTHOR_KEYS[suffix]: _AUTHOR} if suffix in _AUTHOR_KEYS else None
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=dpi, format=suffix[1:], metadata=metadata)
    except ValueError as error:  # an unknown format
        raise ConfigError(f"{path} cannot be written: {error}") from None
    make_folder(path.parent)
    Output(f"{path} cannot be written", path, picture_kind(path)).write(picture.getvalue())


def prepare_output(settings: Any, name: str, kind: Kind, *inputs: Any) -> Output:
    """Check the output file in the field ``name`` of ``settings``, and create its folder, before the work starts.

    ``settings`` is a dataclass or a mapping. Its other paths, and those in ``inputs`` (texts, words of a command line,
    dataclasses, mappings, sequences), are files that must not be overwritten.
    Errors: ``ConfigError`` if the file is one of those or of another kind, or if the folder cannot be written.
    """
    values = (
        settings if isinstance(settings, Mapping) else {f.name: getattr(settings, f.name) for f in fields(settings)}
    )
    path = Path(values[name])
    flag = f"--{name.replace('_', '-')}"
    named = f"{flag} {values[name]}"
    refuse_url(named, path)
    refuse_inputs(named, path, [value for other, value in values.items() if other != name], *inputs)
    make_output_folder(flag, path)
    pipe: int | None = None
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        refuse_other_file(named, path, kind)
        if path.is_fifo():
            pipe = no_follow(path, os.O_WRONLY)
    except OSError as error:
        raise ConfigError(f"{named} cannot be written ({error.strerror}); choose another file") from error
    return Output(named, path, kind, pipe)


def refuse_inputs(named: str, path: Path, *inputs: Any) -> None:
    """``ConfigError`` if the output ``path`` is one of the paths in ``inputs``."""
    for other in _texts(inputs):
        if _is_same(path, Path(other)):
            raise ConfigError(f"{named} would overwrite {other}; choose another output")


@contextmanager
def new_folder(named: str, folder: Path, *inputs: Any) -> Iterator[Path]:
    """A temporary folder whose files appear in ``folder`` when the block ends, and never if it fails.

    ``inputs``: paths that are read. Errors, which begin with ``named``: ``ConfigError`` if ``folder`` is one of those
    or cannot be created, ``CheckpointError`` if it is not empty.
    """
    refuse_url(named, folder)
    refuse_inputs(named, folder, *inputs)
    if os.path.lexists(folder) and not folder.is_dir():
        raise CheckpointError(f"{named} is not a folder; give another one, nothing was written")
    if folder.is_dir() and any(folder.iterdir()):
        raise CheckpointError(f"{named} is not empty; give another folder, nothing was written")
    try:
        make_folder(folder.parent)
        # An existing folder is filled and not replaced: it may be a link, a mounted disk or the current folder.
        partial = (folder if folder.is_dir() else folder.parent) / f".{secrets.token_hex(8)}.partial"
        partial.mkdir()
    except OSError as error:
        raise ConfigError(f"{named} cannot be written ({error.strerror}); give another folder") from error
    try:
        yield partial
        if partial.parent == folder:
            for path in sorted(partial.iterdir()):
                path.rename(folder / path.name)
        else:
            partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _texts(value: Any) -> Iterator[str]:
    """All texts in ``value``; for a word FLAG=VALUE also VALUE."""
    if isinstance(value, str | Path):
        yield str(value)
        if str(value).startswith("--") and "=" in str(value):
            yield str(value).partition("=")[2]
    elif is_dataclass(value):
        yield from _texts([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, Mapping):
        yield from _texts(value.values())
    elif isinstance(value, Iterable):
        for item in value:
            yield from _texts(item)


def _is_same(path: Path, other: Path) -> bool:
    """Whether both paths are the same file, now or once it is created."""
    try:
        if path.exists() and other.exists():
            return os.path.samefile(path, other)
        return bool(str(other)) and os.path.realpath(path) == os.path.realpath(other)
    except (OSError, ValueError):  # texts that are not paths
        return False


def make_output_folder(flag: str, path: str | Path) -> None:
    """Create the folder of an output file before the work starts; ConfigError if it cannot be written."""
    refuse_url(f"{flag} {path}", path)
    folder = Path(path).parent
    try:
        make_folder(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: nothing can be written in {folder} ({error.strerror}); choose another folder"
        ) from error


def no_follow_new(path: str | Path, flags: int) -> int:
    """As ``no_follow``, for a temporary file: an existing file is replaced by a new one."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
