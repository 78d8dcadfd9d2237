"""The work folder: its lock, what the run in it decides, and how far it came."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from megatron_core.datasets.aside import writing_aside
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.parts import remove_parts
from megatron_core.datasets.prepare.settings import PrepareSettings
from megatron_core.datasets.token_writer import Extent
from megatron_core.errors import DataError

# The workers of a run that was killed hold the lock too, until they are gone, some milliseconds later.
LOCK_SECONDS = 1.0


@dataclass
class State:
    """How far the joining came, to be written down and read again.

    group, index: the part to be joined next. extents: of each key's growing files. lines: passed in the current file.
    at: bytes of it on the disk. remarks: bytes of the list of broken and empty documents. first: the first of the
    broken, in words.
    publishing: all is joined, and the files are being given their names.
    """

    group: int = 0
    index: int = 0
    source: int = 0
    lines: int = 0
    remarks: int = 0
    size: int = 0
    documents: int = 0
    broken: int = 0
    empty: int = 0
    at: int = 0
    extents: list[Extent] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    publishing: bool = False


class WorkFolder:
    """`PREFIX.work`, which one process has at a time; `remove` it when the work is done or hopeless.

    fresh: no run has been adopted in it.
    """

    def __init__(self, output_prefix: str) -> None:
        self.path = self.place(output_prefix)
        self._lock = self._locked()
        self.fresh = not (self.path / "run.json").exists()
        if self.fresh:
            # Left where the removal of the folder was interrupted: they belong to no run.
            (self.path / "journal.json").unlink(missing_ok=True)
            remove_parts(self.path)

    @staticmethod
    def place(output_prefix: str) -> Path:
        """Where the folder is."""
        return Path(f"{output_prefix}.work")

    def adopt(self, run: dict[str, Any], part_bytes: int) -> int:
        """Check that an interrupted run in the folder is this run, or begin one; the size of its parts, in bytes.

        DataError: it is another one.
        """
        path = self.path / "run.json"
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if changed := differences(before["run"], run):
                raise DataError(
                    f"{self.path} holds an interrupted run with {changed}; give the same again to go on with it, "
                    "choose another --output-prefix, or remove that folder to start over"
                )
            return int(before["part_bytes"])
        with writing_aside(path) as file:
            file.write(json.dumps({"run": run, "part_bytes": part_bytes}).encode("ascii"))
        return part_bytes

    def read(self) -> State | None:
        """What the journal says; None if there is none yet."""
        path = self.path / "journal.json"
        if not path.exists():
            return None
        content = json.loads(path.read_text(encoding="utf-8"))
        extents = [Extent(**extent) for extent in content.pop("extents")]
        return State(**content, extents=extents)

    def write(self, state: State) -> None:
        """Write the journal; what it says must be on the disk already."""
        with writing_aside(self.path / "journal.json") as file:
            file.write(json.dumps(asdict(state)).encode("ascii"))

    def remove(self) -> None:
        """Remove the folder."""
        # First what the rest belongs to: interrupted here, the next run finds a folder of no run.
        (self.path / "run.json").unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def _locked(self) -> int:
        path = self.path / "lock"
        began = time.monotonic()
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                lock = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
            except FileNotFoundError:  # removed in between by a run that ended
                continue
            except OSError as error:
                raise self._unwritable(error) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(lock)
                if time.monotonic() - began < LOCK_SECONDS:
                    time.sleep(0.01)
                    continue
                raise DataError(
                    f"{self.path} is in use by another process that writes the same output; wait for it, or choose "
                    "another --output-prefix"
                ) from error
            if path.exists() and os.stat(path).st_ino == os.fstat(lock).st_ino:
                return lock
            os.close(lock)

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(
            f"--output-prefix {str(self.path).removesuffix('.work')}: {self.path} cannot be made ({error.strerror}); "
            "choose a folder that can be written to"
        )


def identity(settings: PrepareSettings, sources: Sequence[Source], fingerprint: str) -> dict[str, Any]:
    """All that decides what a run writes, under the names of the flags."""
    return {
        "--json-keys": list(settings.json_keys),
        "--append-eod": settings.append_eod,
        "--split-sentences": settings.split_sentences,
        "--keep-newlines": settings.keep_newlines,
        "--document-separator": settings.document_separator,
        "--tokenizer-type": settings.tokenizer_type,
        "tokenizer fingerprint": fingerprint,
        "--input": [[source.path, source.size, source.mtime_ns] for source in sources],
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """In words, what two runs differ in; empty if in nothing."""
    found = [
        f"{name} {before.get(name)}, now {now[name]}"
        for name in now
        if name != "--input" and before.get(name) != now[name]
    ]
    old, new = before.get("--input", []), now["--input"]
    if [file[0] for file in old] != [file[0] for file in new]:
        pairs = zip_longest((file[0] for file in old), (file[0] for file in new), fillvalue="none")
        place, (was, is_now) = next(item for item in enumerate(pairs, 1) if item[1][0] != item[1][1])
        found.append(f"other --input files (number {place} was {was}, now {is_now})")
    else:
        changed = [file[0] for file, other in zip(old, new, strict=True) if file != other]
        found += [f"another state of {changed[0]}, which has changed since"] if changed else []
    return " and ".join(found)


class Interval:
    """Says when a number of seconds has passed since it last said so."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def passed(self) -> bool:
        """Whether it is time again."""
        now = time.monotonic()
        if now - self._last < self._seconds:
            return False
        self._last = now
        return True
