"""A reader of ``torch.distributed.checkpoint`` that reads the metadata of a folder once."""

import os
from pathlib import Path
from typing import Any, ClassVar

from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import StorageMeta

from megatron_core.hub.megatron_lm.pickles import load_metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """``FileSystemReader`` whose instances for the same folder share its metadata.

    ``cache_metadata=False`` reads the metadata each time. No code that the file names is run.
    Errors: ``CheckpointError`` for a file that is damaged or names other objects than those of metadata.
    """

    _metadata_cache: ClassVar[dict[str, Metadata]] = {}

    def __init__(self, path: str | os.PathLike[str], cache_metadata: bool = True) -> None:
        super().__init__(path)
        self._cache_key = os.path.abspath(path) if cache_metadata else None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the folder, or of the rank ``rank``."""
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        if self._cache_key is None:
            return self._read(path)
        key = os.path.join(self._cache_key, path.name)
        if key not in self._metadata_cache:
            self._metadata_cache[key] = self._read(path)
        return self._metadata_cache[key]

    def _read(self, path: Path) -> Metadata:
        metadata: Metadata = load_metadata(path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    @classmethod
    def clear_metadata_cache(cls) -> None:
        """Forget the metadata of all folders."""
        cls._metadata_cache.clear()
