"""A reader of ``torch.distributed.checkpoint`` that reads the metadata of a folder once."""

import os
from typing import ClassVar

from torch.distributed.checkpoint import FileSystemReader, Metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """``FileSystemReader`` whose instances for the same folder share its metadata.

    ``cache_metadata=False`` reads the metadata each time.
    """

    _metadata_cache: ClassVar[dict[str, Metadata]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cache_key = os.path.abspath(path) if cache_metadata else None

    def read_metadata(self) -> Metadata:
        """Return the metadata of the folder."""
        if self._cache_key is None:
            return super().read_metadata()
        if self._cache_key not in self._metadata_cache:
            self._metadata_cache[self._cache_key] = super().read_metadata()
        return self._metadata_cache[self._cache_key]

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Forget the metadata of all folders."""
        cls._metadata_cache.clear()
