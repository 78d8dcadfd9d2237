"""Local files with the interface of multi-storage-client; object storage must be mounted."""

import builtins
import os
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError


class _Files:
    """``open``, ``os``, ``Path`` and ``path_isdir`` of the local file system."""

    os, Path = os, Path

    @property
    def open(self) -> Any:
        """The function ``open``."""
        return builtins.open

    def path_isdir(self, path: str, strict: bool = True) -> bool:
        """Whether the folder exists."""
        return os.path.isdir(path)


maybe_msc = _Files()


class MultiStorageClientFeature:
    """Whether paths may be URLs of object storage: never."""

    @staticmethod
    def is_enabled() -> bool:
        """Return False."""
        return False

    @staticmethod
    def enable() -> None:
        """Raise ConfigError."""
        raise ConfigError("multi-storage-client is not supported; mount the object storage and give local paths")

    @staticmethod
    def disable() -> None:
        """Do nothing."""
