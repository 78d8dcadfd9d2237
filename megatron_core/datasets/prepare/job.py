"""A whole preparation run: from input files to token files.

Memory: each worker holds a batch of documents with its tokens (a quarter of a MiB of text, or the longest document,
256 MiB at most), and has up to three parts of its own (4 MiB of text, their tokens about half of that) in memory that
it shares with the parent, which holds one batch; the rest is the tokenizer (gigatoken's cache of words grows to 150 MB
and no further) and 200 bytes for each input file. Nothing grows with the number of documents.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_core.datasets.aside import DiskFullError, aside
from megatron_core.datasets.header import DatasetHeader, check_header_path, get_header_path, write_header
from megatron_core.datasets.index_format import DType, get_bin_path, get_idx_path
from megatron_core.datasets.prepare.crew import Crew
from megatron_core.datasets.prepare.documents import Limits
from megatron_core.datasets.prepare.encode import Layout
from megatron_core.datasets.prepare.inputs import Source, describe, find_inputs
from megatron_core.datasets.prepare.join import BrokenDocument, Joiner
from megatron_core.datasets.prepare.journal import Interval, WorkFolder, identity
from megatron_core.datasets.prepare.parts import Group, make_groups, remove_parts
from megatron_core.datasets.prepare.pool import WorkerDiedError
from megatron_core.datasets.prepare.report import Progress, backend_sentence, summary
from megatron_core.datasets.prepare.sample import sample_texts
from megatron_core.datasets.prepare.sentences import sentence_splitter
from megatron_core.datasets.prepare.settings import PrepareSettings, check_settings
from megatron_core.datasets.token_writer import unfinished
from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers import Tokenizer
from megatron_core.tokenizers.fast import READ_BY_GIGATOKEN, disagreement, odd_texts

# The last part is one worker's alone, so that few parts leave the others idle; many cost half a millisecond each. Two
# workers took 0.32 s for 50 MB in 8 to 12 parts each, 0.33 s in 16 or 24, and 0.36 s in 64.
PARTS_EACH = 12
SMALL_PART = 1 << 18


def prepare(settings: PrepareSettings, limits: Limits | None = None) -> None:
    """Read, tokenize and write; nothing has its final name before all of it is there.

    An interrupted run leaves `PREFIX.work` and growing files, and the same call goes on with them.
    ConfigError for settings that cannot be honoured, DataError for input that cannot be read.
    """
    check_settings(settings)
    sources = [describe(path) for path in find_inputs(settings.input, written(settings))]
    for prefix in settings.prefixes:
        check_header_path(prefix)
    work = WorkFolder(settings.output_prefix)
    try:
        Job(settings, sources, limits or Limits(), work).run()
    finally:
        work.close()


class Job:
    """One run, with its workers and its work folder."""

    def __init__(self, settings: PrepareSettings, sources: Sequence[Source], limits: Limits, work: WorkFolder) -> None:
        self._settings = settings
        self._sources = sources
        self._limits = limits
        self._work = work
        self._began = time.monotonic()
        self._fresh = work.fresh
        self._crew: Crew | None = None
        self._joiner: Joiner | None = None
        self._backend = ""

    def run(self) -> None:
        """Do all of it; what is left in the work folder after an error is what the same command can go on with."""
        try:
            self._run()
        except (ConfigError, DataError) as error:
            self._stop()
            self._clean_up(error)
            raise
        finally:
            self._stop()

    def _run(self) -> None:
        crew = self._new_crew(self._settings.tokenization_backend)
        tokenizer = self._settings.tokenizer_files.load()
        layout = self._layout(tokenizer)
        part_bytes = self._part_bytes()
        if self._fresh:
            # Before what is to be known of the run is written down: nothing of it is joined before that.
            crew.begin(layout, make_groups(self._sources, self._settings.separator, part_bytes), (0, 0))
        texts = self._texts_to_compare()
        crew.ask_for(texts)
        # While the back end is being loaded.
        expected = {text: tokenizer.tokenize(text) for text in texts}
        run = identity(self._settings, self._sources, tokenizer.fingerprint())
        part_bytes = self._work.adopt(run, part_bytes)
        joiner = self._joiner = Joiner(
            self._work, self._sources, self._settings.prefixes, remarks_path(self._settings), layout.dtype
        )
        if self._settings.strict:
            joiner.check_strict()
        resumed = joiner.state.size
        if not joiner.state.publishing:
            groups = make_groups(self._sources, self._settings.separator, part_bytes)
            if not self._fresh:
                print(f"{self._work.path}: going on after {joiner.state.documents:,} documents", file=sys.stderr)
                if self._settings.tokenization_backend == "tokenizers":
                    # Those that are not joined may be of another back end, which nobody has compared yet.
                    remove_parts(self._work.path)
                crew.begin(layout, groups, (joiner.state.group, joiner.state.index))
            self._choose_backend(expected, layout, groups)
            self._join_all(tokenizer)
        joiner.publish()
        self._write_headers(tokenizer)
        # A worker may still be making a part behind the end of a packed file.
        self._stop()
        self._work.remove()
        self._report(resumed)

    def _report(self, resumed: int) -> None:
        seconds = time.monotonic() - self._began
        remarks = remarks_path(self._settings)
        backend = self._backend or "an earlier run"
        for line in summary(self._settings.prefixes, self._joiner.state, seconds, resumed, backend, remarks):
            print(line, flush=True)

    def _new_crew(self, backend: str) -> Crew:
        self._crew = Crew(backend, self._settings, self._sources, self._limits, self._work.path, self._part_bytes())
        return self._crew

    def _stop(self) -> None:
        if self._crew is not None:
            self._crew.stop()
        if self._joiner is not None:
            self._joiner.close()

    def _part_bytes(self) -> int:
        settings, total = self._settings, sum(source.size for source in self._sources)
        balanced = max(SMALL_PART, total // (PARTS_EACH * settings.processes))
        return max(1, min(self._limits.part_bytes, balanced, total // settings.partitions))

    def _layout(self, tokenizer: Tokenizer) -> Layout:
        settings = self._settings
        if settings.append_eod and tokenizer.eod is None:
            raise ConfigError("--append-eod: the tokenizer has no end-of-document token; leave the flag out")
        if settings.split_sentences:
            sentence_splitter(settings.keep_newlines)
        dtype = DType.optimal_dtype(tokenizer.vocab_size)
        return Layout(dtype.__name__, tokenizer.vocab_size, tokenizer.eod if settings.append_eod else None)

    def _texts_to_compare(self) -> list[str]:
        """Texts of the input, and odd ones, without repetition; none where only the tokenizer itself can serve."""
        settings = self._settings
        if settings.tokenization_backend == "tokenizers" or settings.tokenizer_type not in READ_BY_GIGATOKEN:
            return []
        texts = sample_texts(settings, self._sources, self._work.path) + odd_texts(settings.tokenizer_files)
        return list(dict.fromkeys(texts))

    def _choose_backend(self, expected: Mapping[str, list[int]], layout: Layout, groups: Sequence[Group]) -> None:
        """Keep the faster back end if it is there and gives the tokenizer's ids on a sample."""
        crew = self._crew
        self._backend, reason, ids, lengths = crew.answer()
        differing = disagreement(expected, ids, lengths) if self._backend == "gigatoken" else None
        if differing is not None:
            reason = f"gigatoken gives other tokens for the text that begins {differing}"
            if self._settings.tokenization_backend == "gigatoken":
                raise ConfigError(f"{reason}; use --tokenization-backend tokenizers")
            crew.stop()
            remove_parts(self._work.path)
            crew = self._new_crew("tokenizers")
            crew.ask_for([])
            crew.begin(layout, groups, (self._joiner.state.group, self._joiner.state.index))
            self._backend = crew.answer()[0]
        print(backend_sentence(self._backend, reason, self._settings.processes), file=sys.stderr, flush=True)

    def _join_all(self, tokenizer: Tokenizer) -> None:
        joiner, state, crew = self._joiner, self._joiner.state, self._crew
        progress = Progress(sum(source.size for source in self._sources), joiner.done, self._settings.log_interval)
        checkpoints = Interval(self._limits.journal_seconds)
        while True:
            for part in crew.ready():
                joiner.append(part, self._settings.strict)
            progress.update(joiner.done, state.documents, joiner.tokens)
            if crew.finished:
                break
            if checkpoints.passed():
                joiner.checkpoint(crew.position)
            for text, ids in crew.receive():
                if tokenizer.tokenize(text) != ids:
                    raise DataError(
                        f"gigatoken gives other tokens than the tokenizer for the text {text[:60]!r}; use "
                        "--tokenization-backend tokenizers"
                    )
        crew.dismiss()
        progress.close()
        state.group, state.index = crew.position
        self._check_something()
        self._show_broken()

    def _check_something(self) -> None:
        if not self._joiner.tokens:
            self._show_broken()
            raise DataError(
                f"--input {' '.join(self._settings.input)[:200]}: no token in it; is there text under --json-keys?"
            )

    def _show_broken(self) -> None:
        for words in self._joiner.state.first:
            print(f"broken: {words}", file=sys.stderr, flush=True)

    def _write_headers(self, tokenizer: Tokenizer) -> None:
        for prefix, extent in zip(self._settings.prefixes, self._joiner.state.extents, strict=True):
            header = DatasetHeader.of(
                tokenizer,
                self._settings.tokenizer_type,
                append_eod=self._settings.append_eod,
                documents=extent.documents,
                tokens=extent.tokens,
            )
            write_header(prefix, header)

    def _clean_up(self, error: Exception) -> None:
        """Leave nothing of a run that would fail again if it went on."""
        if isinstance(error, (DiskFullError, WorkerDiedError)) or not (self._fresh or self._is_faulty(error)):
            return
        if self._joiner is not None:
            self._joiner.discard()
        self._work.remove()

    def _is_faulty(self, error: Exception) -> bool:
        """Whether it is the data: with other flags a run that an earlier one began may go on."""
        return isinstance(error, DataError) and not isinstance(error, BrokenDocument) and self._joiner is not None


def written(settings: PrepareSettings) -> list[Path]:
    """All that a run writes, and the work folder: the input's folder may be the output's."""
    remarks = remarks_path(settings)
    paths = [WorkFolder.place(settings.output_prefix), remarks, aside(remarks)]
    for prefix in settings.prefixes:
        header = Path(get_header_path(prefix))
        finished = [Path(get_bin_path(prefix)), Path(get_idx_path(prefix)), header]
        paths += [*finished, *unfinished(get_bin_path(prefix)), aside(get_idx_path(prefix)), aside(header)]
    return paths


def remarks_path(settings: PrepareSettings) -> Path:
    """The list of broken and empty documents."""
    return Path(f"{settings.output_prefix}_problems.txt")
