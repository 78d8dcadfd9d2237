"""Which products attention takes when queries and keys are runs of a sequence: rectangles and triangles, no s x s mask.

Everything here is arithmetic on positions that the host knows, so that work can be counted without doing it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_core.parallel.micro_batch import Range

Documents = tuple[tuple[int, ...], ...]

LEAST_BAND = 128
"""Queries of a tile with a window are at most the window, or so many: fewer would be more tiles than work."""


@dataclass(frozen=True)
class Tile:
    """Attention of a range of local queries over a range of local keys, for one sequence or all of the micro-batch.

    ``band`` is None where every query sees every key; else (offset, window): query i sees key j if
    0 <= offset + i - j < window, both counted from the tile's first. Every query sees at least one key: a row without
    one would have a log-sum-exp of its own.
    """

    row: int | None
    queries: Range
    keys: Range
    band: tuple[int, int] | None = None

    @property
    def rows(self) -> slice:
        """The sequences of the micro-batch."""
        return slice(None) if self.row is None else slice(self.row, self.row + 1)

    @property
    def is_causal_square(self) -> bool:
        """Whether query i sees keys 0 to i, and as many queries as keys."""
        return self.band is not None and self.band[0] == 0 and self.band[1] >= _size(self.queries) == _size(self.keys)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        queries, keys = _size(self.queries), _size(self.keys)
        if self.band is None:
            return queries * keys
        offset, window = self.band
        return sum(min(offset + i, keys - 1) - max(offset + i - window + 1, 0) + 1 for i in range(queries))


@dataclass(frozen=True)
class _Piece:
    """A range of positions and where its first token lies locally."""

    start: int
    stop: int
    at: int

    def cut(self, start: int, stop: int) -> _Piece:
        """What of it lies in a range of positions."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return _Piece(start, stop, self.at + start - self.start)

    @property
    def local(self) -> Range:
        """The range of local indices."""
        return self.at, self.at + self.stop - self.start


@lru_cache(maxsize=1024)
def tiles(
    queries: tuple[Range, ...], keys: tuple[Range, ...], documents: Documents | None = None, window: int | None = None
) -> tuple[Tile, ...]:
    """The tiles of causal attention, where queries and keys are local sequences made up of these runs of positions.

    Runs are in ascending order, and a run of queries is one of the runs of keys or shares no position with any.
    ``documents`` are the lengths of those in each whole sequence, which see nothing of one another; ``window`` is how
    many keys a query sees, its own and those before it. Two runs have at most one document in common, so that any
    lengths give rectangles and triangles.
    """
    found: list[Tile] = []
    for row, lengths in enumerate(documents or [(max(stop for _, stop in (*queries, *keys)),)]):
        start = 0
        for length in lengths:
            span = (start, start + length)
            for tile in _of_document(_pieces(queries, span), _pieces(keys, span), window):
                found.append(tile if documents is None else replace(tile, row=row))
            start += length
    return tuple(_joined(found))


def _pieces(runs: tuple[Range, ...], span: Range) -> list[_Piece]:
    """What each run has of the positions in ``span``."""
    pieces, at = [], 0
    for start, stop in runs:
        piece = _Piece(start, stop, at).cut(*span)
        if piece.start < piece.stop:
            pieces.append(piece)
        at += stop - start
    return pieces


def _of_document(queries: list[_Piece], keys: list[_Piece], window: int | None) -> Iterator[Tile]:
    if queries and queries == keys and window is None:  # one triangle: the local order is that of positions
        local = queries[0].local[0], queries[-1].local[1]
        yield Tile(None, local, local, (0, _size(local)))
        return
    for query in queries:
        for key in keys:
            yield from _of_pieces(query, key, window)


def _of_pieces(query: _Piece, key: _Piece, window: int | None) -> Iterator[Tile]:
    if window is not None:
        yield from _with_window(query, key, window)
    elif key.stop <= query.start:
        yield Tile(None, query.local, key.local)
    elif (query.start, query.stop) == (key.start, key.stop):
        yield Tile(None, query.local, key.local, (0, _size(query.local)))


def _with_window(query: _Piece, key: _Piece, window: int) -> Iterator[Tile]:
    """Queries in parts, so that none of them reads more keys than twice its window, and their masks are small."""
    most = max(window, LEAST_BAND)
    for first in range(query.start, query.stop, most):
        part = query.cut(first, first + most)
        seen = key.cut(part.start - window + 1, part.stop)
        part = part.cut(seen.start, seen.stop + window - 1)  # those that see one of them
        if seen.start < seen.stop and part.start < part.stop:
            everything = seen.stop <= part.start + 1 and part.stop - seen.start <= window
            yield Tile(None, part.local, seen.local, None if everything else (part.start - seen.start, window))


def _joined(found: list[Tile]) -> Iterator[Tile]:
    """The tiles, neighbouring rectangles made one."""
    last: Tile | None = None
    for tile in found:
        if last is not None and last.band is None and tile.band is None and last.row == tile.row:
            if last.keys == tile.keys and last.queries[1] == tile.queries[0]:
                last = replace(last, queries=(last.queries[0], tile.queries[1]))
                continue
            if last.queries == tile.queries and last.keys[1] == tile.keys[0]:
                last = replace(last, keys=(last.keys[0], tile.keys[1]))
                continue
        if last is not None:
            yield last
        last = tile
    if last is not None:
        yield last


def _size(run: Range) -> int:
    return run[1] - run[0]
