"""Files, as the operating system has them (object storage needs a mount here)."""

from __future__ import annotations

import builtins
import os
from pathlib import Path


class _Files:
    """``open``, ``os``, ``Path`` and ``path_isdir`` under the names of multi-storage-client's wrapper."""

    open, os, Path = staticmethod(builtins.open), os, Path

    def path_isdir(self, path: str, strict: bool = True) -> bool:
        """Whether there is such a folder."""
        return os.path.isdir(path)


maybe_msc = _Files()


class MultiStorageClientFeature:
    """Whether paths may be URLs of object storage: they may not."""

    @staticmethod
    def is_enabled() -> bool:
        """False."""
        return False

    @staticmethod
    def disable() -> None:
        """As it is."""
