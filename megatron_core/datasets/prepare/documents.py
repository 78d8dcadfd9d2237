"""What the readers hand on: some documents at a time, with their places."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """How much is held at once, and how often is written down; bytes are of unpacked input.

    part_bytes: of a part, the work that one worker takes. batch_bytes: that are read and tokenized together.
    document_bytes: of the longest document, at least as many. journal_seconds: between two records of the progress.
    parts_ahead: parts made and not yet joined.
    """

    # A part costs half a millisecond in files and messages, and takes 40 ms with gigatoken, a second without. Small
    # inputs have smaller ones.
    part_bytes: int = 4 << 20
    # From 1/8 to 1/2 MiB no difference can be measured; 1 MiB takes 5% longer, in memory touched for the first time.
    batch_bytes: int = 1 << 18
    document_bytes: int = 256 << 20
    journal_seconds: float = 2.0
    parts_ahead: int = 1000


@dataclass(frozen=True)
class Piece:
    """A range of one input file, `source` its number among the inputs.

    Of lines and texts it has those that start in [start, stop), bytes; of Parquet, the row groups [start, stop).
    """

    source: int
    start: int
    stop: int | None


@dataclass
class Batch:
    """Successive documents of one file.

    lines: passed, with those of no document. places: of each document, its line (row, number) among them, from 1.
    texts: for each key, the documents' texts. broken: place and sentence of each document that is left out.
    """

    lines: int = 0
    size: int = 0
    places: Sequence[int] = field(default_factory=list)
    texts: Sequence[Sequence[str]] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
