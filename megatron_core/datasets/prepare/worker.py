"""What a worker process does: read a part, tokenize it, write its file."""

import ctypes
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from megatron_core.datasets.aside import DiskFullError
from megatron_core.datasets.prepare.documents import Batch, Limits, Piece
from megatron_core.datasets.prepare.encode import Encoded, Layout, Splitter, encode, refused
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.parts import BlockHead, PartWriter
from megatron_core.datasets.prepare.readers import Reader, open_reader
from megatron_core.datasets.prepare.sentences import sentence_splitter
from megatron_core.datasets.prepare.settings import PrepareSettings
from megatron_core.datasets.prepare.shelf import Shelf
from megatron_core.errors import ConfigError, DataError, MegatronError
from megatron_core.tokenizers.fast import Backend, TokenizerBackend, load_backend

PR_SET_PDEATHSIG = 1
# What the parent raises again as it is, the more special kinds first.
KNOWN = (DiskFullError, ConfigError, DataError, OSError)
# Long enough to show a difference, short enough that comparing it takes a third of a millisecond.
PROBE_CHARACTERS = 1000


@dataclass(frozen=True)
class Loaded:
    """The first worker's first words: the back end that was loaded, and why it is not a faster one."""

    name: str
    reason: str


@dataclass(frozen=True)
class Sample:
    """Ask: tokenize texts, if the back end is not the tokenizer itself. Answered by their ids and lengths."""

    texts: list[str]


@dataclass(frozen=True)
class Begin:
    """Tell: how tokens are stored."""

    layout: Layout


@dataclass(frozen=True)
class Task:
    """Ask: make a part, in the slot of the shelf if there is one. Answered by Made."""

    group: int
    index: int
    pieces: list[Piece]
    slot: int | None


@dataclass(frozen=True)
class Made:
    """A part is made. last: its group has no further one. slot: that of its task; shelved: the part is there and not
    in a file. probe: a text and the ids it got, to be compared."""

    group: int
    index: int
    last: bool
    slot: int | None
    shelved: bool
    probe: tuple[str, list[int]] | None


@dataclass(frozen=True)
class Failed:
    """The worker met an error: the kind that names its way out itself, or "" with a traceback."""

    kind: str
    sentence: str


class Worker:
    """Answers the questions that come through the connection, one at a time."""

    def __init__(
        self,
        connection: Connection,
        backend: Backend,
        settings: PrepareSettings,
        sources: Sequence[Source],
        limits: Limits,
        folder: Path,
        shelf: Shelf,
    ) -> None:
        self._connection = connection
        self._backend = backend
        self._settings = settings
        self._sources = sources
        self._limits = limits
        self._folder = folder
        self._shelf = shelf
        self._layout: Layout | None = None
        self._splitter: Splitter | None = None
        self._opened: tuple[int, Reader] | None = None

    def serve(self) -> None:
        """Answer until there is nothing left to ask, or the other side closes the connection."""
        if self._settings.split_sentences:
            self._splitter = sentence_splitter(self._settings.keep_newlines)
        while (message := self._connection.recv()) is not None:
            if isinstance(message, Sample):
                # The tokenizer itself has nothing to prove.
                texts = message.texts if self._backend.name != TokenizerBackend.name else []
                self._connection.send(self._backend.encode(texts))
            elif isinstance(message, Begin):
                self._layout = message.layout
            else:
                self._connection.send(self._make(message))

    def _make(self, task: Task) -> Made:
        writer = PartWriter(self._folder, task.group, task.index, self._shelf, task.slot)
        probe = None
        try:
            for piece in task.pieces:
                reader = self._reader(piece.source)
                for batch in reader.read(piece.start, piece.stop):
                    batch, encoded = self._encoded(batch)
                    writer.add(self._head(piece, reader, batch, encoded), encoded)
                    probe = probe or self._probe(batch, encoded)
            shelved = writer.finish(reader.ended)
        finally:
            writer.close()
        return Made(task.group, task.index, reader.ended, task.slot, shelved, probe)

    def _reader(self, number: int) -> Reader:
        if self._opened is None or self._opened[0] != number:
            if self._opened is not None:
                self._opened[1].close()
            keys, separator = self._settings.json_keys, self._settings.separator
            self._opened = number, open_reader(self._sources[number], keys, separator, self._limits, self._folder)
        return self._opened[1]

    def _encoded(self, batch: Batch) -> tuple[Batch, list[Encoded]]:
        def all_keys(batch: Batch) -> list[Encoded]:
            return [encode(texts, self._backend, self._layout, self._splitter) for texts in batch.texts]

        try:
            return batch, all_keys(batch)
        except MegatronError:
            wrong: dict[int, str] = {}
            for texts in batch.texts:
                wrong |= refused(texts, self._backend)
            if not wrong:
                raise
        kept = [number for number in range(len(batch.places)) if number not in wrong]
        broken = batch.broken + [(batch.places[number], sentence) for number, sentence in wrong.items()]
        texts = [[texts[number] for number in kept] for texts in batch.texts]
        batch = replace(batch, places=[batch.places[n] for n in kept], texts=texts, broken=sorted(broken))
        return batch, all_keys(batch)

    def _head(self, piece: Piece, reader: Reader, batch: Batch, encoded: list[Encoded]) -> BlockHead:
        remarks = [(place, "broken", sentence) for place, sentence in batch.broken]
        for key, part in zip(self._settings.json_keys, encoded, strict=True):
            empty = np.flatnonzero(part.counts == 0).tolist()
            remarks += [(batch.places[number], "empty", f"has no text under {key!r}") for number in empty]
        return BlockHead(
            source=piece.source,
            lines=batch.lines,
            at=reader.raw,
            size=batch.size,
            tokens=[len(part.tokens) for part in encoded],
            sequences=[len(part.lengths) for part in encoded],
            documents=len(batch.places),
            remarks=sorted(remarks),
        )

    def _probe(self, batch: Batch, encoded: list[Encoded]) -> tuple[str, list[int]] | None:
        """A text of the batch and the ids that were stored for it: its first sequence."""
        if self._backend.name == TokenizerBackend.name:
            return None
        part = encoded[0]
        for number, text in enumerate(batch.texts[0]):
            if len(text) <= PROBE_CHARACTERS and part.counts[number]:
                first = int(part.counts[:number].sum())
                start = int(part.lengths[:first].sum(dtype=np.int64))
                ids = part.tokens[start : start + int(part.lengths[first])].tolist()
                sequences = self._splitter(text) if self._splitter else [text]
                if len(sequences) == part.counts[number]:
                    ended = self._layout.eod is not None and len(sequences) == 1
                    return sequences[0], ids[:-1] if ended else ids
        return None


def run_workers(
    connections: Sequence[Connection],
    parent: int,
    backend: str,
    settings: PrepareSettings,
    sources: Sequence[Source],
    limits: Limits,
    folder: Path,
    shelf: Shelf,
) -> None:
    """Load a back end, and serve each connection in a process until the parent is done or gone; errors are sent."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets it too, and says when to stop.
    # Each worker keeps to one core: the tokenizers library would take all of them in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    connection = connections[0]
    try:
        loaded, reason = load_backend(settings.tokenizer_files, backend)
        connection.send(Loaded(loaded.name, reason))
        connection = divided(connections)
        Worker(connection, loaded, settings, sources, limits, folder, shelf).serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except BaseException as error:
        sentence = str(error)
        kind = next((kind.__name__ for kind in KNOWN if isinstance(error, kind)), "")
        if not kind:
            sentence = "".join(traceback.format_exception(error))
        connection.send(Failed(kind, sentence))


def divided(connections: Sequence[Connection]) -> Connection:
    """Fork this process for each connection but the first; each process goes on with the one that is returned to it.

    What was loaded is shared. That is safe because no back end has started a thread before its first batch.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for them.
    mine, first = 0, os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # As in Pool.
        for number in range(1, len(connections)):
            if os.fork() == 0:
                die_with(first)
                mine = number
                break
    for number, connection in enumerate(connections):
        if number != mine:
            connection.close()
    return connections[mine]


def die_with(parent: int) -> None:
    """Have this process killed when the parent ends, whatever it is doing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
