"""Split attention between runs of a sequence into tiles: rectangles and triangles, without an s x s mask.

All functions compute with positions on the host, so that work can be counted without tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron_core.parallel.micro_batch import Range

Documents = tuple[tuple[int, ...], ...]

LEAST_BAND = 128
"""Tiles with a window have at most max(window, LEAST_BAND) queries; smaller tiles would be dominated by overhead."""


@dataclass(frozen=True)
class Tile:
    """Attention of a range of local queries over a range of local keys, for one or all sequences of the micro-batch.

    ``band`` is None if every query sees every key; else (offset, window): query i sees key j if
    0 <= offset + i - j < window, both counted from the tile's first. Every query sees at least one key, because the
    log-sum-exp of a row without keys would need special treatment.
    """

    row: int | None
    queries: Range
    keys: Range
    band: tuple[int, int] | None = None

    @property
    def rows(self) -> slice:
        """Slice of the tile's sequences in the micro-batch."""
        return slice(None) if self.row is None else slice(self.row, self.row + 1)

    @property
    def is_causal_square(self) -> bool:
        """Whether query i sees keys 0 to i, and the number of queries equals the number of keys."""
        return self.band is not None and self.band[0] == 0 and self.band[1] >= _size(self.queries) == _size(self.keys)

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a visible key."""
        queries = _size(self.queries)
        keys = _size(self.keys)
        if self.band is None:
            return queries * keys
        offset, window = self.band
        return sum(min(offset + i, keys - 1) - max(offset + i - window + 1, 0) + 1 for i in range(queries))


@dataclass(frozen=True)
class _PositionRange:
    """A range of positions and the local index of its first token."""

    start: int
    stop: int
    offset: int

    def cut(self, start: int, stop: int) -> "_PositionRange":
        """The intersection with a range of positions."""
        start = max(start, self.start)
        stop = min(stop, self.stop)
        return _PositionRange(start, stop, self.offset + start - self.start)

    @property
    def local(self) -> Range:
        """The range of local indices."""
        return self.offset, self.offset + self.stop - self.start


@lru_cache(maxsize=1024)
def tiles(
    queries: tuple[Range, ...], keys: tuple[Range, ...], documents: Documents | None = None, window: int | None = None
) -> tuple[Tile, ...]:
    """The tiles of causal attention between local queries and keys; both consist of the given runs of positions.

    Runs are in ascending order; a run of queries is either equal to a run of keys or disjoint from all of them.
    ``documents`` are the lengths of the documents in each whole sequence; documents do not attend to one another.
    ``window`` is the number of keys visible to a query: its own and the preceding ones. Two runs have at most one
    document in common, so that any lengths give rectangles and triangles.
    """
    rectangles: list[Tile] = []
    # Without documents the tiles are the same for all sequences, and one call computes the batch.
    for row, lengths in enumerate(documents or [(max(stop for _, stop in (*queries, *keys)),)]):
        start = 0
        for length in lengths:
            span = (start, start + length)
            for tile in _of_document(_pieces(queries, span), _pieces(keys, span), window):
                rectangles.append(tile if documents is None else replace(tile, row=row))
            start += length
    return tuple(_joined(rectangles))


def _pieces(runs: tuple[Range, ...], span: Range) -> list[_PositionRange]:
    """The intersection of each run with the positions in ``span``."""
    pieces = []
    offset = 0
    for start, stop in runs:
        piece = _PositionRange(start, stop, offset).cut(*span)
        if piece.start < piece.stop:
            pieces.append(piece)
        offset += stop - start
    return pieces


def _of_document(queries: list[_PositionRange], keys: list[_PositionRange], window: int | None) -> Iterator[Tile]:
    # One call instead of three: two triangles and the rectangle between them.
    if queries and queries == keys and window is None:  # one triangle: local indices are in the order of positions
        local = queries[0].local[0], queries[-1].local[1]
        yield Tile(None, local, local, (0, _size(local)))
        return
    for query in queries:
        for key in keys:
            yield from _of_pieces(query, key, window)


def _of_pieces(query: _PositionRange, key: _PositionRange, window: int | None) -> Iterator[Tile]:
    if window is not None:
        yield from _with_window(query, key, window)
    # Keys after the queries have no tile: causal attention skips half of the work.
    elif key.stop <= query.start:
        yield Tile(None, query.local, key.local)
    elif (query.start, query.stop) == (key.start, key.stop):
        yield Tile(None, query.local, key.local, (0, _size(query.local)))


def _with_window(query: _PositionRange, key: _PositionRange, window: int) -> Iterator[Tile]:
    """Split queries into parts, each of which reads at most twice its window of keys, so that masks are small."""
    most = max(window, LEAST_BAND)
    for first in range(query.start, query.stop, most):
        rows = query.cut(first, first + most)
        seen = key.cut(rows.start - window + 1, rows.stop)
        rows = rows.cut(seen.start, seen.stop + window - 1)  # queries with at least one visible key
        if seen.start < seen.stop and rows.start < rows.stop:
            everything = seen.stop <= rows.start + 1 and rows.stop - seen.start <= window
            yield Tile(None, rows.local, seen.local, None if everything else (rows.start - seen.start, window))


def _joined(rectangles: list[Tile]) -> Iterator[Tile]:
    """Merge adjacent rectangles."""
    previous: Tile | None = None
    for tile in rectangles:
        if previous is not None and previous.band is None and tile.band is None and previous.row == tile.row:
            # Fewer and larger products: a zig-zag has two runs, which are often adjacent locally.
            if previous.keys == tile.keys and previous.queries[1] == tile.queries[0]:
                previous = replace(previous, queries=(previous.queries[0], tile.queries[1]))
                continue
            if previous.queries == tile.queries and previous.keys[1] == tile.keys[0]:
                previous = replace(previous, keys=(previous.keys[0], tile.keys[1]))
                continue
        if previous is not None:
            yield previous
        previous = tile
    if previous is not None:
        yield previous


def _size(run: Range) -> int:
    return run[1] - run[0]
