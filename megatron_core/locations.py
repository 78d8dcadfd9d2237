"""Places of files: paths, URLs of object storage, and the folder on this machine that belongs to a URL."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from megatron_core.errors import ConfigError

CACHE_VARIABLE = "MEGATRON_STORAGE_CACHE"
"""Environment variable with the folder for copies of objects; default: megatron-native/storage in the user's cache."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def cache_folder() -> Path:
    """Folder of this machine for copies of objects."""
    chosen = os.environ.get(CACHE_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(chosen) if chosen else Path(cache) / "megatron-native" / "storage"


def path_of(text: str) -> Path | None:
    """The path that ``text`` or a file:// URL names; None for the URL of object storage."""
    if text.startswith("file://"):
        return Path(unquote(urlsplit(text.replace("?", "%3F").replace("#", "%23")).path))
    return None if _URL.match(text) else Path(text)


def is_same_place(first: str, second: str) -> bool:
    """Whether two texts name the same folder, also through symbolic links, or the same URL."""

    def plain(text: str) -> str:
        path = path_of(text)
        return text.rstrip("/") if path is None else os.path.realpath(path)

    return plain(first) == plain(second)


def run_folder(save: str) -> Path:
    """Folder on this machine for the other files of a run that saves its checkpoints to ``save``: ``save`` itself, or
    for a URL a folder in the cache."""
    path = path_of(save)
    if path is not None:
        return path
    return cache_folder() / "runs" / hashlib.sha256(save.rstrip("/").encode()).hexdigest()[:32]


class ObjectPath:
    """A file or folder in object storage: the base class of ``Feature.urls``.

    Its subclasses also have the methods of ``Path`` that checkpoints and token files use. There is no rename, and an
    object appears with its whole content when its writer is closed.
    """

    def read_range(self, start: int, length: int) -> bytes:
        """``length`` bytes from byte ``start`` on, fewer at the end of the object."""
        raise NotImplementedError

    def writer(self) -> Any:
        """An object for ``write``, and then ``close`` or ``discard``, that sends a large object in parts."""
        raise NotImplementedError

    def files(self) -> set[str]:
        """The names of all objects in the folder and its folders, relative to it."""
        raise NotImplementedError

    def remove_tree(self) -> None:
        """Delete all objects in the folder; errors are ignored."""
        raise NotImplementedError

    def local_copy(self) -> Path:
        """A copy on this machine."""
        raise NotImplementedError

    def cached_folder(self) -> Path:
        """Folder in the cache of this machine for the present version of the object."""
        raise NotImplementedError

    def open_tensors(self) -> Any:
        """The object with the interface of ``safetensors.safe_open``."""
        raise NotImplementedError

    def open_tokens(self) -> Any:
        """The object for reads of many small parts: its ``size``, and ``read(position, length)``."""
        raise NotImplementedError


def location(text: str | Path) -> Path:
    """The place that ``text`` names: a ``Path``, or for a URL such as s3://bucket/folder an ``ObjectPath``.

    The result is typed as ``Path``, because its users call only methods that both have. ``file://`` URLs are paths.
    Errors: ``ConfigError`` if there is no support for the URL's scheme.
    """
    if not isinstance(text, str):
        return text
    path = path_of(text)
    if path is not None:
        return path
    # Imported here: the list of features imports the configuration, which imports this module.
    from megatron_core.feature import features, load_hook

    hook = next((feature.urls for feature in features() if feature.urls is not None), None)
    if hook is None:
        raise ConfigError(f"{text} is a URL, and no feature reads URLs; give a folder")
    return cast(Path, load_hook(hook)(text))


def in_storage(path: Path) -> ObjectPath | None:
    """``path`` if it is in object storage, else None."""
    place: object = path
    return place if isinstance(place, ObjectPath) else None


def real(path: Path) -> str:
    """The path without symbolic links, or the URL, for comparisons."""
    return str(path) if in_storage(path) is not None else os.path.realpath(path)


def read_part(path: Path, start: int, length: int) -> bytes:
    """``length`` bytes of a file from byte ``start`` on, fewer at its end."""
    remote = in_storage(path)
    if remote is not None:
        return remote.read_range(start, length)
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def local_copy(path: Path) -> Path:
    """``path`` itself, or of an object or a folder of objects a copy on this machine. Errors: ``OSError``."""
    remote = in_storage(path)
    return path if remote is None else remote.local_copy()
