"""Writes files and folders without overwriting other programs' data or following symbolic links."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_core.errors import CheckpointError, ConfigError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Beginning of a URL, also as a ``Path``, which has one slash, but not of a drive of Windows."""
_STREAMS = ("/dev", "/dev/fd", "/proc/self/fd")
"""Folders of links to the standard streams, which may be files."""
LARGEST_COMPARED = 2**26
"""Number of bytes of an existing file that are read to recognise its kind."""


@dataclass(frozen=True)
class Kind:
    """The kind of an output file. ``accepts`` recognises it by the first bytes of an existing file."""

    name: str
    accepts: Callable[[bytes], bool]


def starting_with(name: str, *beginnings: bytes) -> Kind:
    """Files that start with one of ``beginnings``, even if truncated within it."""
    return Kind(name, lambda data: any(data.startswith(b) or b.startswith(data) for b in beginnings))


def json_lines(name: str, *beginnings: bytes) -> Kind:
    """JSON Lines in which a line in the first 64 KiB starts with one of ``beginnings``; other lines may be damaged."""
    return Kind(
        name,
        lambda data: any(
            line.startswith(b) or (number == 0 and b.startswith(line))
            for number, line in enumerate(data[: 2**16].split(b"\n"))
            for b in beginnings
        ),
    )


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


def refuse_url(named: str, path: object) -> None:
    """``ConfigError`` if ``path``, which must be on this machine, is a URL. ``named`` is the setting with its value."""
    if _URL.match(str(path)):
        raise ConfigError(
            f"{named}: a URL is not accepted here, because only checkpoints are written to object storage, and only "
            "text, token files and checkpoints read from it; give a path on this machine, and copy the files"
        )


def refuse_other_file(named: str, path: str | Path, kind: Kind) -> None:
    """``ConfigError`` if ``path`` is a URL, a symbolic link to a file or to nothing, or a file of another kind.

    ``named`` is the setting with its value.
    """
    refuse_url(named, path)
    path = Path(path)
    # In a shared folder, another user could place a link that leads to any file of this user.
    if path.is_symlink() and not _is_stream(path):
        raise ConfigError(f"{named}: {path} is a symbolic link, which is not allowed here; give the file itself")
    if not path.is_file():
        return
    with path.open("rb") as file:
        data = file.read(LARGEST_COMPARED)
    if data and not kind.accepts(data):
        raise ConfigError(
            f"{named}: {path} exists and is not a {kind.name}, so it is not overwritten; choose another file, or "
            "remove it"
        )


@dataclass(frozen=True)
class Output:
    """An output file that has been prepared."""

    named: str
    """The setting with its value."""
    path: Path
    kind: Kind
    pipe: int | None = None
    """Descriptor of a named pipe, which stays open, because closing it would end its reader."""

    def write(self, content: str | bytes) -> None:
        """Write the file as a whole. Errors: ``OSError``; ``ConfigError`` if another program has created it by now."""
        # Names of files may have bytes that are not UTF-8.
        data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        if self.pipe is not None:
            with open(self.pipe, "wb") as file:
                file.write(data)
            return
        refuse_other_file(self.named, self.path, self.kind)
        with new_file(self.path) as file:
            file.write(data)


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
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears, or replaces the existing one, when the block ends, and never if it fails.

    Devices, pipes and standard streams are written directly: root could replace them.
    """
    if _is_stream(path) or (path.exists() and not path.is_file()):
        with open(path, "wb", opener=no_follow) as stream:
            yield stream
        return
    # A unique name, so that no file of others has it; it does not depend on the length of the final name.
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            # The content reaches the disk before the name, so that a crash leaves the old file or the new one.
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):
            partial.chmod(stat.S_IMODE(path.stat().st_mode))
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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


def make_folder(folder: str | Path) -> None:
    """Create a folder and its parents.

    In a folder that all users may write, such as /tmp and /dev/shm, new folders get mode 700, and existing folders and
    links must belong to this user or to root.

    Errors: ``OSError``; ``ConfigError`` for a URL.
    """
    refuse_url(str(folder), folder)
    real = os.path.realpath(folder)
    # Links on the way and their targets: either could belong to another user.
    for path in dict.fromkeys((os.path.abspath(folder), real)):
        folder_path = Path(path)
        for ancestor in [*reversed(folder_path.parents), folder_path][1:]:
            if not _check_owner(ancestor) and path == real:
                _make_one(ancestor)
    if not os.path.isdir(real):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def _check_owner(path: Path) -> bool:
    """Whether ``path`` exists; ``PermissionError`` if it may belong to another user."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if status.st_uid not in (0, os.geteuid()) and _is_shared(path.parent):
        raise PermissionError(
            errno.EPERM, f"it belongs to user {status.st_uid}, in a folder that all users may write", str(path)
        )
    return True


def _make_one(path: Path) -> None:
    try:
        path.mkdir(0o700 if _is_shared(path.parent) else 0o777)
    except FileExistsError:  # created by another process
        _check_owner(path)


def _is_shared(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def no_follow(path: str | Path, flags: int) -> int:
    """An ``opener`` for ``open`` that refuses symbolic links, except to a pipe or a device, such as /dev/stdout."""
    if stat.S_ISFIFO(_mode(path)):  # opening would block until another process reads
        flags |= os.O_NONBLOCK
    try:
        opened = os.open(path, flags | os.O_CLOEXEC | (0 if _is_stream(path) else os.O_NOFOLLOW), 0o666)
        os.set_blocking(opened, True)
        return opened
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "it is a named pipe without a reader; choose a file", str(path)) from None
        if error.errno == errno.ELOOP:
            raise OSError(
                errno.ELOOP, "it is a symbolic link, which is not allowed here; remove it", str(path)
            ) from None
        raise


def _is_stream(path: str | Path) -> bool:
    """Whether ``path`` is a link to a pipe or a device, or to a standard stream, which may be a file."""
    if not os.path.islink(path) or not os.path.exists(path):
        return False
    is_special = not os.path.isfile(path) and not os.path.isdir(path)
    return is_special or os.path.dirname(os.path.abspath(path)) in _STREAMS


def _mode(path: str | Path) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def no_follow_new(path: str | Path, flags: int) -> int:
    """As ``no_follow``, for a temporary file: an existing file is replaced by a new one."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)


def is_still_at(descriptor: int, path: str | Path) -> bool:
    """Whether the open file still exists under this name: it was not deleted, renamed or replaced."""
    try:
        there = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # temporarily unreachable, as on a network file system
        return True
    open_file = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (open_file.st_dev, open_file.st_ino)
