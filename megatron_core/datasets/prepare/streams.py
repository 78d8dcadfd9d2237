"""Input files as streams of bytes, unpacked on the way, and a file that is cut off is never taken for whole."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import zstandard

from megatron_core.datasets.prepare.inputs import Source
from megatron_core.errors import DataError

BUFFER_BYTES = 1 << 18
# What is unpacked at once: even of zeros alone, which zstd packs 1 to 17,000, no more than the longest document.
PACKED_BYTES = 1 << 14


class Stream:
    """The bytes of an input file in order; only a file that is not compressed goes back to an earlier place.

    position: of the next byte. raw: bytes of the file on the disk that were read for it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.position = 0
        self._raw = Path(source.path).open("rb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._file = _unpacked(self._raw, source)

    @property
    def raw(self) -> int:
        """Bytes of the file on the disk that were read up to now."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """The next `size` bytes, fewer only at the end."""
        with naming(self.source):
            data = self._file.read(size)
        self.position += len(data)
        return data

    def readline(self, limit: int) -> bytes:
        """The rest of the line with its end, or its first `limit` bytes."""
        with naming(self.source):
            data = self._file.readline(limit)
        self.position += len(data)
        return data

    def skip_to(self, position: int) -> None:
        """Go to a later place, or near the end if the file ends before it."""
        if self.source.compression is None:
            self._file.seek(position)
            self.position = position
        while self.position < position and self.read(min(BUFFER_BYTES, position - self.position)):
            pass

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        self._raw.close()


@contextmanager
def naming(source: Source) -> Iterator[None]:
    """Faults of a compressed file become a DataError that names it."""
    try:
        yield
    except EOFError as error:
        raise DataError(
            f"{source.path} is cut off: its {source.compression} data ends too early; copy or make it again"
        ) from error
    except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            f"{source.path} is damaged, or no {source.compression} file ({error}); make it again"
        ) from error


class ZstdFile(io.RawIOBase):
    """The content of all frames of a zstd file; EOFError where the last one does not end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        # As large as `zstd --ultra --long=31` makes it.
        self._unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._unpacker.decompressobj()
        self._fresh = True
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: memoryview) -> int:
        """Fill the buffer as far as one piece of the file goes; 0 at the end."""
        while not self._ready:
            packed = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._fresh = self._unpacker.decompressobj(), True
            packed = packed or self._raw.read(PACKED_BYTES)
            if not packed:
                if not self._fresh:
                    raise EOFError
                return 0
            self._fresh = False
            self._ready = memoryview(self._frame.decompress(packed))
        taken = min(len(buffer), len(self._ready))
        buffer[:taken] = self._ready[:taken]
        self._ready = self._ready[taken:]
        return taken


def _unpacked(raw: BinaryIO, source: Source) -> BinaryIO:
    if source.compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if source.compression == "zstd":
        return io.BufferedReader(ZstdFile(raw), BUFFER_BYTES)
    return raw
