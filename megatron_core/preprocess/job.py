"""A whole preprocessing run: from input files to token files.

This process reads compressed files, Parquet files and texts with separators, and writes the output; the workers read
plain files and tokenize. Memory: each worker holds a batch of documents with its tokens (a quarter of a MiB of text, or
the longest document), and up to three queued tasks (4 MiB of text each, or their tokens, about half of that); the rest
is the tokenizer (gigatoken's cache of words is limited to 150 MB) and 200 bytes per input file. Memory does not depend
on the number of documents.
"""

import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import chain
from multiprocessing import parent_process
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any

from megatron_core.datasets.header import DatasetHeader, check_header_path, get_header_path
from megatron_core.datasets.indexed import DType, get_bin_path, get_idx_path
from megatron_core.errors import ConfigError, DataError
from megatron_core.output_file import refuse_other_file, starting_with
from megatron_core.preprocess.atomic_write import DiskFullError, partial_path
from megatron_core.preprocess.builder import refuse_existing, refuse_other_files, unfinished, write_header
from megatron_core.preprocess.inputs import DamagedFileError, InputFile, describe_input, find_inputs
from megatron_core.preprocess.output import BrokenDocumentError, TokenOutput, WorkFolder, identity, work_path
from megatron_core.preprocess.readers import content_blocks
from megatron_core.preprocess.report import IntervalTimer, JobProgress, backend_sentence, counted, summary_lines
from megatron_core.preprocess.settings import Limits, PreprocessSettings, check_preprocessing
from megatron_core.preprocess.worker import InputRange, TokenFormat, Worker, sentence_splitter
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.fast import Backend, TokenizerBackend, disagreement, load_backend, odd_texts

# Tasks per worker: one completed, one running, one queued.
TASKS_EACH = 3

_WORK: list[Callable[[Any], Any]] = []


class WorkerDiedError(DataError):
    """A worker process was killed; the saved progress is kept, and the same command resumes from it."""


class WorkerPool:
    """Processes forked from this one that call `work` on tasks; they inherit all objects that `work` refers to.

    close_in_workers: file descriptors to close in the workers.
    """

    def __init__(self, workers: int, work: Callable[[Any], Any], close_in_workers: tuple[int, ...] = ()) -> None:
        self._workers = workers
        self._context = _Context()
        self._executor = ProcessPoolExecutor(workers, self._context, _start, (work, close_in_workers))

    def map(self, tasks: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of the tasks in order; at most `TASKS_EACH` tasks per worker are pending."""
        pending: deque = deque()
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns about a fork with threads: numpy's BLAS has threads, but supports fork.
                warnings.simplefilter("ignore", DeprecationWarning)
                for task in tasks:
                    pending.append(self._executor.submit(_run, task))
                    if len(pending) >= TASKS_EACH * self._workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "a worker process died, perhaps because of insufficient memory; run the same command with fewer "
                "--workers than "
                f"{self._workers}: it continues"
            ) from error

    def stop(self) -> None:
        """Kill the workers immediately, and return when they have exited."""
        for process in self._context.started:
            process.kill()
        self._executor.shutdown()


class _Context(ForkContext):
    """Records the started processes, because the executor has no public attribute for them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:
        self.started.append(super().Process(*args, **kwargs))
        return self.started[-1]


def _start(work: Callable[[Any], Any], close: tuple[int, ...]) -> None:
    _WORK[:] = [work]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent stops this process.
    # Use one core per worker: the tokenizers library would use all cores in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for descriptor in close:
        os.close(descriptor)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has a parent"
    parent.join()
    os._exit(1)


def _run(task: Any) -> Any:
    return _WORK[0](task)


PROBLEMS = starting_with("list of broken and empty documents", b"broken: ", b"empty: ", b"damaged: ")

# Workers are idle during the last tasks: with 12 tasks each at most 4% of the time. A task costs half a millisecond.
TASKS_PER_WORKER = 12
SMALL_TASK = 1 << 18
MOST_PIECES = 1000

# Sample for the comparison of backends: number of positions in the input, and characters of text at each position.
SAMPLE_PLACES = 16
SAMPLE_CHARACTERS = 1024
SAMPLE_BYTES = 1 << 14


def preprocess(settings: PreprocessSettings, limits: Limits | None = None) -> None:
    """Read, tokenize and write; files get their final names only when all output is complete.

    An interrupted run leaves `PREFIX.work` and partial files (`.partial`); the same call resumes from them.
    ConfigError for invalid settings, DataError for unreadable input.
    """
    check_preprocessing(settings)
    sources = [describe_input(path) for path in find_inputs(settings.input, written(settings))]
    for prefix in settings.prefixes:
        check_header_path(prefix)
    refuse_other_file(f"--output-prefix {settings.output_prefix}", remarks_path(settings), PROBLEMS)
    work = WorkFolder(settings.output_prefix)
    try:
        _Job(settings, sources, limits or Limits(), work).run()
    finally:
        work.close()


NO_ENDS = (
    "note: without --append-eod nothing marks the end of a document: a model does not learn to end one, and "
    "--reset-position-ids, --reset-attention-mask and --eod-mask-loss cannot separate documents"
)


class _Job:
    """One run in its work folder."""

    def __init__(
        self, settings: PreprocessSettings, sources: Sequence[InputFile], limits: Limits, work: WorkFolder
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._limits = limits
        self._work = work
        self._began = time.monotonic()
        self._fresh = work.fresh
        self._output: TokenOutput | None = None
        self._remarks = remarks_path(settings)

    def run(self) -> None:
        """Run the job; after an error the work folder contains only progress that the same command can resume."""
        try:
            self._run()
        except (ConfigError, DataError) as error:
            self._clean_up(error)
            raise
        finally:
            if self._output is not None:
                self._output.close()

    def _run(self) -> None:
        settings = self._settings
        work = self._work
        if not settings.overwrite and not (work.state and work.state.publishing):
            refuse_existing(settings.prefixes)
        refuse_other_files(settings.prefixes)
        tokenizer = settings.tokenizer_files.load()
        layout = make_layout(settings, tokenizer)
        backend, reason = choose_backend(settings, tokenizer, self._sources, work.path)
        work.adopt(identity(settings, self._sources, tokenizer.fingerprint()))
        output = self._output = TokenOutput(work, self._sources, settings, self._remarks, layout.dtype)
        resumed = output.state.size
        if not self._fresh:
            print(f"{work.path}: continuing after {output.state.documents:,} documents", file=sys.stderr)
        if not output.state.publishing:
            print(backend_sentence(backend.name, reason, settings.processes), file=sys.stderr, flush=True)
            if not settings.append_eod and tokenizer.eod is not None:
                print(NO_ENDS, file=sys.stderr, flush=True)
            worker = Worker(settings, self._sources, self._limits, work.path, backend, tokenizer, layout)
            pool = WorkerPool(settings.processes, worker.run, (work.lock,))
            try:
                self._append_all(output, pool)
            finally:
                pool.stop()
        output.publish()
        self._write_headers(output, tokenizer)
        work.remove()
        seconds = time.monotonic() - self._began
        for line in summary_lines(settings.prefixes, output.state, seconds, resumed, backend.name, self._remarks):
            print(line, flush=True)

    def _append_all(self, output: TokenOutput, pool: WorkerPool) -> None:
        total = sum(source.size for source in self._sources)
        progress = JobProgress(total, output.done, self._settings.log_interval)
        saves = IntervalTimer(self._limits.save_seconds)
        balanced = max(SMALL_TASK, total // (TASKS_PER_WORKER * self._settings.processes))
        size = min(self._limits.part_bytes, balanced)
        pieces = read_pieces(self._settings, self._sources, self._limits, self._work.path, size, output.state.position)
        for encoded_parts in pool.map(group_pieces(pieces, self._sources, size)):
            for encoded in encoded_parts:
                output.append(encoded)
            progress.update(output.done, output.state.documents, output.tokens)
            if saves.passed():
                output.save()
        progress.close()
        for words in output.state.first:
            print(words, file=sys.stderr, flush=True)
        if not output.tokens:
            why = "is there text under --json-keys?"
            if output.state.broken:
                why = f"{counted(output.state.broken, 'broken document')} omitted; the first one is named above"
            raise DataError(f"--input {' '.join(self._settings.input)}: the input has no tokens; {why}")

    def _write_headers(self, output: TokenOutput, tokenizer: Tokenizer) -> None:
        for prefix, extent in zip(self._settings.prefixes, output.state.extents, strict=True):
            header = DatasetHeader.of(
                tokenizer,
                self._settings.tokenizer_type,
                append_eod=self._settings.append_eod,
                documents=extent.documents,
                tokens=extent.tokens,
            )
            write_header(prefix, header)

    def _clean_up(self, error: Exception) -> None:
        """Remove the progress of a run that would fail again if it were resumed."""
        output = self._output
        if isinstance(error, (DiskFullError, WorkerDiedError)):
            return
        if isinstance(error, DamagedFileError) and output is not None and output.state.documents:
            return
        wrong_data = isinstance(error, DataError) and not isinstance(error, BrokenDocumentError) and output is not None
        if self._fresh or wrong_data:
            if output is not None:
                output.discard()
            self._work.remove()


def make_layout(settings: PreprocessSettings, tokenizer: Tokenizer) -> TokenFormat:
    """Return the storage format of tokens; ConfigError if the tokenizer or a package does not support the settings."""
    if settings.append_eod and tokenizer.eod is None:
        raise ConfigError("--append-eod: the tokenizer has no end-of-document token; remove the flag")
    if settings.split_sentences:
        sentence_splitter(settings.keep_newlines)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    return TokenFormat(dtype.__name__, tokenizer.vocab_size, tokenizer.eod if settings.append_eod else None)


def choose_backend(
    settings: PreprocessSettings, tokenizer: Tokenizer, sources: Sequence[InputFile], folder: Path
) -> tuple[Backend, str]:
    """Return gigatoken if it is available and gives the tokenizer's ids on a sample; else the tokenizer, and why."""
    backend, reason = load_backend(tokenizer, settings.tokenization_backend)
    if backend.name == TokenizerBackend.name:
        return backend, reason
    texts = sample_texts(settings, sources, folder) + odd_texts(tokenizer)
    expected = {text: tokenizer.tokenize(text) for text in texts}
    differing = disagreement(expected, *backend.encode(list(expected)))
    if differing is None:
        return backend, ""
    reason = f"gigatoken gives different tokens for the text that begins with {differing}"
    if settings.tokenization_backend == "gigatoken":
        raise ConfigError(f"{reason}; use --tokenization-backend tokenizers")
    return TokenizerBackend(tokenizer), reason


def sample_texts(settings: PreprocessSettings, sources: Sequence[InputFile], folder: Path) -> list[str]:
    """Return the beginnings of texts at 16 positions spread over the files, 16 thousand characters in total."""
    total = sum(source.size for source in sources)
    starts = [total * i // SAMPLE_PLACES for i in range(SAMPLE_PLACES)]
    limits = Limits(batch_bytes=SAMPLE_BYTES)
    texts: list[str] = []
    before = 0
    for source in sources:
        inside = [start - before for start in starts if before <= start < before + source.size]
        before += source.size
        # Compressed files can only be read from their beginning.
        anywhere = source.format == "jsonl" and source.compression is None
        ranges = [(start, start + SAMPLE_BYTES) for start in inside] if anywhere else [(0, None)] * bool(inside)
        for start, stop in ranges:
            wanted = SAMPLE_CHARACTERS * (1 if anywhere else len(inside))
            with suppress(DamagedFileError):  # the run reports it when it reads the file
                for block in content_blocks(
                    source, settings.json_keys, settings.separator, limits, folder, start, stop
                ):
                    for text in chain.from_iterable(zip(*block.batch(settings.json_keys).texts, strict=True)):
                        texts += [text[:wanted]] * (wanted > 0)
                        wanted -= len(text)
                    if wanted <= 0:
                        break
    return texts


def read_pieces(
    settings: PreprocessSettings,
    sources: Sequence[InputFile],
    limits: Limits,
    folder: Path,
    size: int,
    position: tuple[int, int],
) -> Iterator[InputRange]:
    """Yield the pieces of all files from a position on; this process reads files that can only be read sequentially.

    size: bytes of the ranges into which a plain JSON Lines file is divided.
    """
    start = position[1]
    for number in range(position[0], len(sources)):
        source = sources[number]
        if source.format == "jsonl" and source.compression is None:
            for begin in range(start, source.size, size):
                end = begin + size
                yield InputRange(number, begin, end if end < source.size else None, raw=min(end, source.size))
        elif source.format == "text" and settings.separator is None:
            yield InputRange(number, raw=source.size)
        else:
            try:
                for block in content_blocks(source, settings.json_keys, settings.separator, limits, folder, start):
                    yield InputRange(number, start, block.end, block=block)
            except DamagedFileError as error:
                yield InputRange(number, damage=str(error))
        start = 0


def group_pieces(pieces: Iterable[InputRange], sources: Sequence[InputFile], size: int) -> Iterator[list[InputRange]]:
    """Group pieces into tasks of `size` bytes or slightly more, so that many small files make few tasks."""
    group: list[InputRange] = []
    total = 0
    for piece in pieces:
        group.append(piece)
        end = sources[piece.source].size if piece.end is None else piece.end
        total += piece.block.size if piece.block else end - piece.start
        if total >= size or len(group) >= MOST_PIECES:
            yield group
            group = []
            total = 0
    if group:
        yield group


def written(settings: PreprocessSettings) -> list[Path]:
    """Return all paths written by a run, to exclude them from the input if both are in the same folder."""
    remarks = remarks_path(settings)
    paths = [work_path(settings.output_prefix), remarks, partial_path(remarks)]
    for prefix in settings.prefixes:
        header = Path(get_header_path(prefix))
        finished = [Path(get_bin_path(prefix)), Path(get_idx_path(prefix)), header]
        paths += [
            *finished,
            *unfinished(get_bin_path(prefix)),
            partial_path(get_idx_path(prefix)),
            partial_path(header),
        ]
    return paths


def remarks_path(settings: PreprocessSettings) -> Path:
    """Path of the list of broken and empty documents."""
    return Path(f"{settings.output_prefix}_problems.txt")
