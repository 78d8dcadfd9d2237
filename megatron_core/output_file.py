"""Writes files and folders without overwriting other programs' data or following symbolic links."""

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_core.errors import ConfigError

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
