"""A whole preprocessing run: from input files to token files.

This process reads compressed files, long row groups and texts with separators, and writes the output; the workers read
plain files and tokenize. Memory: each worker holds a batch of documents with its tokens (a quarter of a MiB of text, or
the longest document), and up to three queued tasks (4 MiB of text each, or their tokens, about half of that); the rest
is the tokenizer (gigatoken's cache of words is limited to 150 MB) and 200 bytes per input file. Memory does not depend
on the number of documents.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from megatron_core.data_parts.manifest import PartEntry, PartList, get_parts_path, relative_to_list
from megatron_core.datasets.header import DatasetHeader, check_header_path, get_header_path
from megatron_core.datasets.indexed import DType, get_bin_path, get_idx_path
from megatron_core.errors import ConfigError, DataError
from megatron_core.output_file import refuse_other_file, starting_with
from megatron_core.preprocess import inputs
from megatron_core.preprocess.atomic_write import DiskFullError, atomic_write, partial_path, sync_file
from megatron_core.preprocess.backends import Backend, TokenizerBackend, disagreement, load_backend, odd_texts
from megatron_core.preprocess.builder import Extent, refuse_existing, refuse_other_files, unfinished, write_header
from megatron_core.preprocess.engines import PartsInOrder, write_partition
from megatron_core.preprocess.identity import identity, token_identity
from megatron_core.preprocess.inputs import InputFile
from megatron_core.preprocess.output import BrokenDocumentError, TokenOutput, WorkFolder, work_path
from megatron_core.preprocess.parts import PartFolder, parts_path
from megatron_core.preprocess.plan import SMALL_TASK, TASKS_PER_WORKER, InputPart, group_pieces, plan_parts, read_pieces
from megatron_core.preprocess.pool import WorkerDiedError, WorkerPool
from megatron_core.preprocess.readers import content_blocks
from megatron_core.preprocess.report import IntervalTimer, JobProgress, backend_sentence, counted, summary_lines
from megatron_core.preprocess.settings import Limits, PreprocessSettings, check_preprocessing
from megatron_core.preprocess.worker import EncodedPart, TokenFormat, Worker, sentence_splitter
from megatron_core.tokenizers import Tokenizer


class CountedTokens:
    """The interface of `TokenWriter` for tokens that are already in their files: it only counts."""

    def __init__(self, bin_path: str, dtype: Any, resume: Extent | None = None) -> None:
        self.extent = Extent()

    def append(self, tokens: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Count documents: tokens, the length of each sequence [S], the number of sequences per document [D]."""
        now = self.extent
        self.extent = Extent(now.tokens + len(tokens), now.sequences + len(lengths), now.documents + len(counts))

    def cut(self, extent: Extent) -> None:
        """Return to an earlier extent."""
        self.extent = extent

    def close(self) -> None:
        """Nothing is open."""

    def discard(self) -> None:
        """Nothing was written."""


class KeptParts(TokenOutput):
    """Checks the parts in the order of the input as `TokenOutput` does, and lists those that belong to the result."""

    writer = CountedTokens

    def __init__(
        self, work: WorkFolder, sources: Sequence[InputFile], settings: PreprocessSettings, remarks: Path, dtype: str
    ) -> None:
        work.state = None  # reading the counts of all parts again takes seconds
        super().__init__(work, sources, settings, remarks, dtype)
        self._folder = PartFolder(settings)
        self._parts: list[tuple[InputPart, list[PartEntry]]] = []
        self._damaged: set[int] = set()

    def note_part(self, shard: InputPart) -> None:
        """Add a part whose content has been appended."""
        records = self._folder.records(shard)
        self._damaged |= {r.source for r, record in zip(shard.ranges, records, strict=True) if record["damage"]}
        entries = []
        for name, prefix, (tokens, sequences, documents) in zip(
            self._settings.key_names, self._prefixes, records[-1]["extents"], strict=True
        ):
            path = relative_to_list(prefix, str(self._folder.prefix(shard, name)))
            entries.append(PartEntry(path, sequences, documents, tokens))
        self._parts.append((shard, entries))

    @property
    def part_names(self) -> set[str]:
        """Names of the parts that the lists contain."""
        return {shard.name for shard, _ in self._kept()}

    def save(self) -> None:
        """Nothing: the parts are the progress."""

    def publish(self) -> None:
        """Write the lists, and remove an earlier pair of each name."""
        self._note_extents()
        sync_file(self._open_remarks)
        self.close()
        for number, prefix in enumerate(self._prefixes):
            entries = [entries[number] for _, entries in self._kept()]
            for path in (get_bin_path(prefix), get_idx_path(prefix)):
                Path(path).unlink(missing_ok=True)
            with atomic_write(get_parts_path(prefix)) as file:
                file.write(PartList(self._dtype, tuple(entries)).encoded())
        self._publish_remarks()

    def _kept(self) -> list[tuple[InputPart, list[PartEntry]]]:
        """The parts, except those of damaged files; a part of several files is without the damaged ones."""
        return [
            (shard, entries)
            for shard, entries in self._parts
            if not (len(shard.sources) == 1 and set(shard.sources) <= self._damaged)
        ]


PROBLEMS = starting_with("list of broken and empty documents", b"broken: ", b"empty: ", b"damaged: ")

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
    with ThreadPoolExecutor(16) as pool:  # a request for an object takes some 30 ms
        sources = list(pool.map(inputs.describe_input, inputs.find_inputs(settings.input, written(settings))))
    for prefix in settings.prefixes:
        check_header_path(prefix)
    refuse_other_file(f"--output-prefix {settings.output_prefix}", remarks_path(settings), PROBLEMS)
    if settings.partition:
        write_one_partition(settings, sources, limits or Limits())
        return
    with closing(WorkFolder(settings.output_prefix)) as work:
        _Job(settings, sources, limits or Limits(), work).run()


NO_ENDS = (
    "note: without --append-eod nothing marks the end of a document: a model does not learn to end one, and "
    "--reset-position-ids, --reset-attention-mask and --eod-mask-loss cannot separate documents"
)


class _Job:
    """One run in its work folder."""

    def __init__(
        self, settings: PreprocessSettings, sources: Sequence[inputs.InputFile], limits: Limits, work: WorkFolder
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
        output_class = KeptParts if settings.keep_parts else TokenOutput
        output = self._output = output_class(work, self._sources, settings, self._remarks, layout.dtype)
        resumed = output.state.size
        if not self._fresh:
            print(f"{work.path}: continuing after {output.state.documents:,} documents", file=sys.stderr)
        if not output.state.publishing:
            announce(settings, tokenizer, backend, reason)
            worker = Worker(settings, self._sources, self._limits, work.path, backend, tokenizer, layout)
            if settings.in_parts:
                self._append_parts(output, worker)
            else:
                self._append_all(output, worker)
        output.publish()
        self._write_headers(output, tokenizer)
        work.remove()
        if settings.in_parts:
            PartFolder(settings).clean(output.part_names)
        seconds = time.monotonic() - self._began
        for line in summary_lines(settings.prefixes, output.state, seconds, resumed, backend.name, self._remarks):
            print(line, flush=True)

    def _append_all(self, output: TokenOutput, worker: Worker) -> None:
        total = sum(source.size for source in self._sources)
        progress = JobProgress(total, output.done, self._settings.log_interval)
        balanced = max(SMALL_TASK, total // (TASKS_PER_WORKER * self._settings.processes))
        size = min(self._limits.part_bytes, balanced)
        pieces = read_pieces(self._settings, self._sources, self._limits, self._work.path, size, output.state.position)
        pool = WorkerPool(self._settings.processes, worker.run, (self._work.lock,))
        try:
            for _ in self._appended(output, pool.map(group_pieces(pieces, size))):
                progress.update(output.done, output.state.documents, output.tokens)
        finally:
            pool.stop()
        progress.close()
        self._show_first(output)

    def _append_parts(self, output: TokenOutput, worker: Worker) -> None:
        settings = self._settings
        position = (0, 0) if settings.keep_parts else output.state.position
        names = token_identity(settings, worker.tokenizer.fingerprint())
        shards = plan_parts(self._sources, names, settings.part_bytes, position)
        joined = PartsInOrder(settings, self._limits, worker, shards, output)
        try:
            for _ in self._appended(output, joined.results()):
                joined.appended()
        finally:
            joined.stop()
        self._show_first(output)

    def _appended(self, output: TokenOutput, results: Iterable[Iterable[EncodedPart]]) -> Iterator[None]:
        """Append all results, and save the progress; yields after each of them. DataError: there are no tokens."""
        saves = IntervalTimer(self._limits.save_seconds)
        for encoded_parts in results:
            for encoded in encoded_parts:
                output.append(encoded)
            if saves.passed():
                output.save()
            yield

    def _show_first(self, output: TokenOutput) -> None:
        """Print the first broken documents. DataError: there are no tokens."""
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
        if (
            isinstance(error, (inputs.DamagedFileError, inputs.UnreachableFileError))
            and output is not None
            and output.state.documents
        ):
            return
        wrong_data = isinstance(error, DataError) and not isinstance(error, BrokenDocumentError) and output is not None
        if self._fresh or wrong_data:
            if output is not None:
                output.discard()
            self._work.remove()


def announce(settings: PreprocessSettings, tokenizer: Tokenizer, backend: Backend, reason: str) -> None:
    """Print the backend, and a note if documents have no end."""
    print(backend_sentence(backend.name, reason, settings.processes), file=sys.stderr, flush=True)
    if not settings.append_eod and tokenizer.eod is not None:
        print(NO_ENDS, file=sys.stderr, flush=True)


def write_one_partition(settings: PreprocessSettings, sources: Sequence[inputs.InputFile], limits: Limits) -> None:
    """Write the parts of --partition I/N: the I-th and every N-th after it, except those that are complete."""
    folder = PartFolder(settings)
    tokenizer = settings.tokenizer_files.load()
    layout = make_layout(settings, tokenizer)
    with TemporaryDirectory(prefix="sample.", dir=folder.path) as unpacked:
        backend, reason = choose_backend(settings, tokenizer, sources, Path(unpacked))
    announce(settings, tokenizer, backend, reason)
    number, total = settings.share
    identity = token_identity(settings, tokenizer.fingerprint())
    shards = plan_parts(sources, identity, settings.part_bytes, (0, 0))[number - 1 :: total]
    write_partition(
        settings, limits, Worker(settings, sources, limits, folder.path, backend, tokenizer, layout), shards
    )


def make_layout(settings: PreprocessSettings, tokenizer: Tokenizer) -> TokenFormat:
    """Return the storage format of tokens; ConfigError if the tokenizer or a package does not support the settings."""
    if settings.append_eod and tokenizer.eod is None:
        raise ConfigError("--append-eod: the tokenizer has no end-of-document token; remove the flag")
    if settings.split_sentences:
        sentence_splitter(settings.keep_newlines)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    return TokenFormat(dtype.__name__, tokenizer.vocab_size, tokenizer.eod if settings.append_eod else None)


def choose_backend(
    settings: PreprocessSettings, tokenizer: Tokenizer, sources: Sequence[inputs.InputFile], folder: Path
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


def sample_texts(settings: PreprocessSettings, sources: Sequence[inputs.InputFile], folder: Path) -> list[str]:
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
            with suppress(inputs.DamagedFileError):  # the run reports it when it reads the file
                for block in content_blocks(
                    source, settings.json_keys, settings.separator, limits, folder, start, stop
                ):
                    for text in chain.from_iterable(zip(*block.batch(settings.json_keys).texts, strict=True)):
                        texts += [text[:wanted]] * (wanted > 0)
                        wanted -= len(text)
                    if wanted <= 0:
                        break
    return texts


def written(settings: PreprocessSettings) -> list[Path]:
    """Return all paths written by a run, to exclude them from the input if both are in the same folder."""
    remarks = remarks_path(settings)
    paths = [work_path(settings.output_prefix), parts_path(settings), remarks, partial_path(remarks)]
    for prefix in settings.prefixes:
        header = Path(get_header_path(prefix))
        listed = Path(get_parts_path(prefix))
        finished = [Path(get_bin_path(prefix)), Path(get_idx_path(prefix)), header, listed, partial_path(listed)]
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
