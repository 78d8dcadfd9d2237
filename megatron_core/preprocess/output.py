"""The output of a run: partial token files, the list of broken documents, and the saved progress."""

import fcntl
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from megatron_core.data_parts.manifest import get_parts_path
from megatron_core.datasets.indexed import DType, get_bin_path, get_idx_path, index_bytes
from megatron_core.errors import DataError
from megatron_core.output_file import make_folder, no_follow
from megatron_core.preprocess.atomic_write import (
    atomic_write,
    close_quietly,
    naming_full_disk,
    open_partial,
    partial_path,
    sync_file,
)
from megatron_core.preprocess.builder import Extent, TokenWriter, publish_pair
from megatron_core.preprocess.identity import differences
from megatron_core.preprocess.inputs import DamagedFileError, InputFile
from megatron_core.preprocess.plan import InputPart
from megatron_core.preprocess.readers import DOCUMENT_WORDS
from megatron_core.preprocess.settings import PreprocessSettings
from megatron_core.preprocess.worker import EncodedPart

SHOWN = 5
_PARTIAL = re.compile(r"(run|progress)\.json\.partial|\.?[0-9a-f]+\.partial")
"""Pattern of the names of incomplete files in a work folder, also of earlier releases."""
_OWN = re.compile(rf"lock|(run|progress)\.json|[0-9a-f]{{64}}\.parquet|{_PARTIAL.pattern}")
"""Pattern of the file names in a work folder."""

T = TypeVar("T")


class BrokenDocumentError(DataError):
    """The first broken document with `--strict`; the same command without that flag resumes."""


@dataclass
class OutputState:
    """Progress of the output.

    position: index of the next file to read, and the position in it. source: index of the last file read. lines, raw:
    lines and bytes read from that file. remarks: bytes of the list of broken and empty documents. first: descriptions
    of the first broken documents. dropped: bytes of text without a token. file_start: the state before the last file
    read. publishing: the output is complete, and the files are being renamed.
    """

    position: tuple[int, int] = (0, 0)
    source: int = -1
    lines: int = 0
    raw: int = 0
    remarks: int = 0
    size: int = 0
    documents: int = 0
    broken: int = 0
    empty: int = 0
    dropped: int = 0
    damaged: int = 0
    extents: list[Extent] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    file_start: "OutputState | None" = None
    publishing: bool = False

    @property
    def used(self) -> int:
        """Number of files read completely or partly."""
        return max(self.position[0], self.source + 1)

    @classmethod
    def of(cls, content: dict[str, Any]) -> "OutputState":
        """The inverse of `asdict`."""
        parsed = {
            "extents": [Extent(**extent) for extent in content["extents"]],
            "position": tuple(content["position"]),
            "file_start": content["file_start"] and cls.of(content["file_start"]),
        }
        return cls(**{**content, **parsed})


class WorkFolder:
    """`PREFIX.work`, locked by one process at a time; call `remove` when the run is complete or cannot succeed.

    state: progress of an interrupted run; None without one. lock: file descriptor of the folder's lock.
    """

    def __init__(self, output_prefix: str) -> None:
        self.path = work_path(output_prefix)
        self.lock = self._locked()
        self.state: OutputState | None = None
        for path in self.path.iterdir():
            if _PARTIAL.fullmatch(path.name):
                path.unlink()
        if not (self.path / "run.json").exists():
            # A file of an interrupted removal.
            (self.path / "progress.json").unlink(missing_ok=True)
        elif (self.path / "progress.json").exists():
            self.state = self._read("progress.json", OutputState.of)

    @property
    def fresh(self) -> bool:
        """Whether the folder has no interrupted run."""
        return not (self.path / "run.json").exists()

    def adopt(self, run: dict[str, Any]) -> None:
        """Check that an interrupted run in the folder has the same settings as `run`, or begin a new run.

        Input files that have not been read yet may differ. DataError: the interrupted run is a different one.
        """
        path = self.path / "run.json"
        if path.exists():
            inputs_read = self.state.used if self.state else 0
            if changed := self._read("run.json", lambda before: differences(before, run, inputs_read)):
                raise DataError(
                    f"{self.path} has an interrupted run with {changed}; use the same settings to continue it, choose "
                    "another --output-prefix, or remove that folder to start over"
                )
        self._write("run.json", run)

    def save(self, state: OutputState) -> None:
        """Save the progress; the counted output must already be synced to disk."""
        self._write("progress.json", asdict(state))

    def remove(self) -> None:
        """Remove the folder, unless it contains a file of another program by now."""
        # Remove run.json first: if the removal is interrupted, the other files are ignored.
        (self.path / "run.json").unlink(missing_ok=True)
        for path in self.path.iterdir():
            if _OWN.fullmatch(path.name):
                path.unlink(missing_ok=True)
        with suppress(OSError):
            self.path.rmdir()

    def close(self) -> None:
        """Release the lock of the folder."""
        os.close(self.lock)

    def _read(self, name: str, parse: Callable[[dict[str, Any]], T]) -> T:
        try:
            return parse(json.loads((self.path / name).read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DataError(f"{self.path / name} is damaged ({error}); remove {self.path} to start over") from None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with atomic_write(self.path / name) as file:
            file.write(json.dumps(content).encode("ascii"))

    def _locked(self) -> int:
        path = self.path / "lock"
        tries = 100
        while True:
            try:
                make_folder(self.path)
                if strays := sorted(entry.name for entry in self.path.iterdir() if not _OWN.fullmatch(entry.name)):
                    raise DataError(
                        f"{self.path} contains {strays[0]} and is not the folder of an interrupted run; choose another "
                        "--output-prefix, or move it away"
                    )
                lock = no_follow(path, os.O_CREAT | os.O_RDWR)
            except OSError as error:
                tries -= 1
                if isinstance(error, FileNotFoundError) and tries:  # a finished run has removed the folder meanwhile
                    continue
                raise DataError(
                    f"--output-prefix {str(self.path).removesuffix('.work')}: {self.path} cannot be created "
                    f"({error.strerror}); choose a folder that can be written to"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                raise DataError(
                    f"{self.path} is in use by another process that writes the same output; wait for it, or choose "
                    "another --output-prefix"
                ) from error
            if path.exists() and os.stat(path).st_ino == os.fstat(lock).st_ino:
                return lock
            os.close(lock)


def work_path(output_prefix: str) -> Path:
    """Path of the folder of an unfinished run."""
    return Path(f"{output_prefix}.work")


class TokenOutput:
    """Appends parts to the token files of every key and to the list of broken and empty documents.

    saved: the position up to which the progress is saved.
    """

    writer: Callable[..., Any] = TokenWriter

    def __init__(
        self, work: WorkFolder, sources: Sequence[InputFile], settings: PreprocessSettings, remarks: Path, dtype: str
    ) -> None:
        self._work = work
        self._sources = sources
        self._settings = settings
        self._prefixes = settings.prefixes
        self._remarks_path = remarks
        self._dtype = dtype
        stored = work.state
        growing = [*map(partial_path, map(get_bin_path, self._prefixes)), partial_path(remarks)]
        if stored is not None and not stored.publishing and not all(path.exists() for path in growing):
            stored = None  # The partial files were removed.
        self.state = stored or OutputState()
        self.saved = self.state.position
        # Number of files before the current one, and their total bytes.
        self._before = (0, 0)
        self._writers: list[Any] = []
        self._remarks: BinaryIO | None = None
        if self.state.publishing:
            return
        extents: Sequence[Extent | None] = self.state.extents or [None] * len(self._prefixes)
        self._writers = [
            self.writer(get_bin_path(prefix), dtype, resume=extent)
            for prefix, extent in zip(self._prefixes, extents, strict=True)
        ]
        self._remarks = open_partial(partial_path(remarks), "r+b" if stored else "wb")
        self._remarks.truncate(self.state.remarks)
        self._remarks.seek(self.state.remarks)
        if settings.strict and self.state.broken:
            words = next((words for words in self.state.first if words.startswith("broken: ")), "a broken document")
            raise BrokenDocumentError(f"{words.removeprefix('broken: ')} (--strict)")

    @property
    def part_names(self) -> set[str]:
        """Names of parts that belong to the result, and must be kept."""
        return set()

    def note_part(self, shard: InputPart) -> None:
        """Called after the content of a part has been appended; the tokens are copied, so nothing is noted."""

    @property
    def tokens(self) -> int:
        """Total number of tokens of all keys."""
        return sum(writer.extent.tokens for writer in self._writers)

    @property
    def done(self) -> int:
        """Number of bytes of input files read from disk."""
        while self._before[0] < self.state.source:
            number, size = self._before
            self._before = (number + 1, size + self._sources[number].size)
        return self._before[1] + self.state.raw

    def append(self, encoded_part: EncodedPart) -> None:
        """Append a part.

        BrokenDocumentError: the first broken document with --strict. DamagedFileError: the file of the part is damaged;
        raised without --skip-damaged-files, after the file's output is removed and the progress is saved.
        """
        piece = encoded_part.piece
        state = self.state
        if piece.source < state.position[0]:
            return  # Part of a damaged file that is skipped.
        if piece.damage:
            self._leave_out(piece.source, piece.damage)
            return
        if piece.source != state.source:
            self._note_extents()
            state.file_start = replace(state, file_start=None, first=[*state.first])
            state.source = piece.source
            state.lines = 0
        for line, category, sentence in encoded_part.remarks:
            word = DOCUMENT_WORDS[self._sources[piece.source].format]
            self._remark(category, f"{self._sources[piece.source].path}, {word} {state.lines + line} {sentence}")
        for encoded in encoded_part.encoded:
            for writer, sequences in zip(self._writers, encoded, strict=True):
                writer.append(sequences.tokens, sequences.lengths, sequences.counts)
        state.lines += encoded_part.lines
        state.documents += encoded_part.documents
        state.size += encoded_part.size
        state.dropped += encoded_part.dropped
        state.raw = encoded_part.raw
        state.position = (piece.source + 1, 0) if piece.end is None else (piece.source, piece.end)

    def save(self) -> None:
        """Sync all appended output to disk, and save the progress."""
        for writer in self._writers:
            writer.sync()
        self._note_extents()
        sync_file(self._open_remarks)
        self._work.save(self.state)
        self.saved = self.state.position

    def publish(self) -> None:
        """Write the indices and rename all files; after an interruption a second call completes the remaining steps."""
        if not self.state.publishing:
            for prefix, writer in zip(self._prefixes, self._writers, strict=True):
                writer.write_index(get_idx_path(prefix))
            self.state.publishing = True
            self._note_extents()
            sync_file(self._open_remarks)
            self._work.save(self.state)
            self.close()
        for prefix in self._prefixes:
            publish_pair(get_bin_path(prefix), get_idx_path(prefix))
        self._check_published()
        for prefix in self._prefixes:
            Path(get_parts_path(prefix)).unlink(missing_ok=True)
        self._publish_remarks()

    def _publish_remarks(self) -> None:
        if partial_path(self._remarks_path).exists():
            os.replace(partial_path(self._remarks_path), self._remarks_path)
        if not self.state.remarks:
            self._remarks_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the partial files and keep them."""
        for writer in self._writers:
            writer.close()
        if self._remarks is not None:
            close_quietly(self._remarks)

    def discard(self) -> None:
        """Remove the partial files."""
        self.close()
        for writer in self._writers:
            writer.discard()
        paths: list[str | Path] = [self._remarks_path, *map(get_idx_path, self._prefixes)]
        for path in paths:
            partial_path(path).unlink(missing_ok=True)

    def _check_published(self) -> None:
        """DataError if published files are missing or differ in size from the written files."""
        for prefix, extent in zip(self._prefixes, self.state.extents, strict=True):
            sizes = {
                get_bin_path(prefix): extent.tokens * DType.size(self._dtype),
                get_idx_path(prefix): index_bytes(extent.sequences, extent.documents + 1, multimodal=False),
            }
            for path, size in sizes.items():
                actual = Path(path).stat().st_size if Path(path).is_file() else None
                if actual != size:
                    there = "is missing" if actual is None else f"has {actual:,} bytes"
                    raise DataError(
                        f"{path} {there}, but this run wrote {size:,} bytes: another program removed or changed it; "
                        "run the same command with --overwrite to start over"
                    )

    @property
    def _open_remarks(self) -> BinaryIO:
        assert self._remarks is not None, "open until the output is published"
        return self._remarks

    def _note_extents(self) -> None:
        self.state.extents = [writer.extent for writer in self._writers]
        self.state.remarks = self._open_remarks.tell()

    def _remark(self, category: str, words: str) -> None:
        with naming_full_disk(self._open_remarks):
            self._open_remarks.write(f"{category}: {words}\n".encode("utf-8", errors="backslashreplace"))
        if category == "empty":
            self.state.empty += 1
            return
        if self._settings.strict and category == "broken":
            raise BrokenDocumentError(f"{words} (--strict)")
        self.state.broken += category == "broken"
        self.state.damaged += category == "damaged"
        if len(self.state.first) < SHOWN:
            self.state.first.append(f"{category}: {words}")

    def _leave_out(self, source: int, damage: str) -> None:
        """Remove the output of a damaged file; then raise, or skip to the next file."""
        before = self.state.file_start
        if self.state.source == source and before is not None:
            self.state = before
            for writer, extent in zip(self._writers, self.state.extents, strict=True):
                writer.cut(extent)
            self._open_remarks.truncate(self.state.remarks)
            self._open_remarks.seek(self.state.remarks)
        self.state.position = (source, 0)
        if not self._settings.skip_damaged_files:
            self.save()
            raise DamagedFileError(
                f"{damage}; progress up to this file is kept; repair the file, remove it from --input, or add "
                "--skip-damaged-files, and run the same command again"
            )
        self._remark("damaged", damage)
        self.state.position = (source + 1, 0)
