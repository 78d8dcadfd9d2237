"""Plain text: a file is one document, or several with a separator between them."""

from collections.abc import Iterator

from megatron_core.datasets.prepare.documents import Batch, Limits
from megatron_core.datasets.prepare.read_lines import too_long
from megatron_core.datasets.prepare.streams import Stream


class TextReader:
    """Reads ranges of one text file, each range later than the one before.

    Separators are found from the file's beginning on, so that it does not matter where a range begins. An empty
    piece behind the last separator is no document. A byte-order mark at the file's beginning is no text.
    """

    def __init__(self, stream: Stream, keys: int, separator: str | None, limits: Limits) -> None:
        self._stream = stream
        self._keys = keys
        self._limits = limits
        self._documents = split(stream, separator.encode("utf-8") if separator else None, limits.document_bytes)
        self._next: tuple[int, bytes | None] | None = next(self._documents, None)

    def read(self, start: int, stop: int | None) -> Iterator[Batch]:
        """The documents that start in [start, stop), in batches."""
        while self._next is not None and self._next[0] < start:
            self._next = next(self._documents, None)
        batch, texts = Batch(places=[]), []
        while self._next is not None and (stop is None or self._next[0] < stop):
            batch.lines += 1
            place, data = batch.lines, self._next[1]
            text = too_long(self._limits) if data is None else decoded(data, first=self._next[0] == 0)
            if data is None or isinstance(text, UnicodeDecodeError):
                broken = text if data is None else f"is no UTF-8 ({text}); mend or remove it"
                batch.broken.append((place, str(broken)))
            else:
                batch.places.append(place)
                texts.append(text)
                batch.size += len(data)
            self._next = next(self._documents, None)
            if batch.size >= self._limits.batch_bytes:
                batch.texts = [texts] * self._keys
                yield batch
                batch, texts = Batch(places=[]), []
        batch.texts = [texts] * self._keys
        yield batch

    @property
    def ended(self) -> bool:
        """Whether no document is left."""
        return self._next is None

    @property
    def raw(self) -> int:
        """Bytes of the file that were read up to now."""
        return self._stream.raw

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def decoded(data: bytes, first: bool) -> "str | UnicodeDecodeError":
    """The text, or what is wrong with it."""
    try:
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        return error


def split(stream: Stream, separator: bytes | None, most: int) -> Iterator[tuple[int, bytes | None]]:
    """Where each document starts, and its bytes; None instead of more than `most` bytes."""
    if separator is None:
        data = stream.read(most + 1)
        yield 0, (data if len(data) <= most else None)
        return
    # A bytearray grows in place: bytes would be copied at each read, 80 MB without a separator took 27 s, and now 0.2.
    start, held, begin, long = 0, bytearray(), 0, False
    while data := stream.read(1 << 16):
        # A separator can lie across two reads.
        searched = max(begin, len(held) - len(separator) + 1)
        held += data
        while (end := held.find(separator, searched)) >= 0:
            yield start, (None if long or end - begin > most else bytes(held[begin:end]))
            start += end - begin + len(separator)
            begin = searched = end + len(separator)
            long = False
        del held[:begin]
        begin = 0
        if len(held) > most:
            # What is dropped counts for where the next document starts, and only for that.
            dropped = len(held) - len(separator) + 1
            start, long = start + dropped, True
            del held[:dropped]
    if held or long:
        yield start, (None if long else bytes(held))
