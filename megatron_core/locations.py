"""Names of places: URLs of object storage, and the folder on this machine that belongs to one."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
        return Path(unquote(urlsplit(text).path))
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
