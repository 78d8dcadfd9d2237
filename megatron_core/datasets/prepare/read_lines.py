"""JSON Lines: the lines that start in a range of a file, and the texts in them."""

import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

import orjson

from megatron_core.datasets.prepare.documents import Batch, Limits
from megatron_core.datasets.prepare.streams import BUFFER_BYTES, Stream


class LineReader:
    """Reads ranges of one JSON Lines file, each range later than the one before."""

    def __init__(self, stream: Stream, keys: Sequence[str], limits: Limits) -> None:
        self._stream = stream
        self._keys = tuple(keys)
        self._limits = limits
        self.ended = False

    def read(self, start: int, stop: int | None) -> Iterator[Batch]:
        """The documents of the lines that start in [start, stop), in batches; `ended` says if the file ended there."""
        for data in self._blocks(start, stop):
            yield parse(data, self._keys) if data is not None else self._too_long()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    @property
    def raw(self) -> int:
        """Bytes of the file that were read up to now."""
        return self._stream.raw

    def _too_long(self) -> Batch:
        return Batch(lines=1, broken=[(1, too_long(self._limits))])

    def _blocks(self, start: int, stop: int | None) -> Iterator[bytes | None]:
        """Blocks of whole lines, None for a line that is too long to be held."""
        stream, most = self._stream, self._limits.document_bytes
        self._go_to_line(start)
        while stop is None or stream.position < stop:
            size = self._limits.batch_bytes
            data = stream.read(size if stop is None else min(size, stop - stream.position))
            if not data:
                self.ended = True
                return
            tail = b"" if data.endswith(b"\n") else stream.readline(most + 2)
            begin = data.rfind(b"\n") + 1
            # The line's end does not count: the last line of a file may have none.
            if len((data[begin:] + tail).removesuffix(b"\n")) <= most:
                yield data + tail
                continue
            if begin:
                yield data[:begin]
            if not tail.endswith(b"\n"):
                self._finish_line()
            yield None

    def _go_to_line(self, start: int) -> None:
        """Go to the first line that starts at `start` or later."""
        # Behind `start` the stream stands where the last range's last line ended.
        if self._stream.position < start:
            self._stream.skip_to(start - 1)
            self._finish_line()

    def _finish_line(self) -> None:
        while (data := self._stream.readline(BUFFER_BYTES)) and not data.endswith(b"\n"):
            pass


def too_long(limits: Limits) -> str:
    """The sentence for a document that is too long."""
    return f"has more than {limits.document_bytes:,} bytes; split it into several documents"


def parse(data: bytes, keys: tuple[str, ...]) -> Batch:
    """The texts under the keys in whole lines of JSON; blank lines are none."""
    lines = BytesIO(data).readlines()  # in a third of the time of bytes.split, which looks at one byte after the other
    places, found, broken = [], [], []
    for place, line in enumerate(lines, 1):
        try:
            texts = texts_of(line, keys)
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            if line.strip():
                broken.append((place, fault(line, keys, error)))
            continue
        places.append(place)
        found.append(texts)
    texts = list(zip(*found, strict=True)) if found else [()] * len(keys)
    return Batch(len(lines), len(data), places, texts, broken)


def texts_of(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts under the keys of a line of JSON; ValueError, LookupError or TypeError where they are not there."""
    try:
        document, halves = orjson.loads(line), False
    except ValueError:
        # Slower, and takes more: a byte-order mark, NaN, nesting without a bound, halves of surrogate pairs.
        document, halves = json.loads(line), True
    texts = [document[key] for key in keys]
    if not all(type(text) is str for text in texts):
        raise TypeError
    if halves:
        "".join(texts).encode("utf-8")
    return texts


def fault(line: bytes, keys: Sequence[str], error: Exception) -> str:
    """What is wrong with a line that holds no document, continuing a sentence that begins with its place."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return f"is no JSON ({error}); mend or remove the line"
    if not isinstance(document, dict):
        return f'holds {_kind(document)}, expected an object such as {{"text": ...}} on each line'
    missing = [key for key in keys if key not in document]
    if missing:
        there = ", ".join(sorted(document)[:10]) or "none"
        return f"has no key {missing[0]!r}; its keys: {there}; choose with --json-keys"
    for key in keys:
        if not isinstance(document[key], str):
            return f"has {_kind(document[key])} under {key!r}, expected a string"
    return "has half of a surrogate pair in its text, which is no text; mend it"


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
