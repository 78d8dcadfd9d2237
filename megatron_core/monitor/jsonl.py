"""Metrics as JSON Lines: one object per line, flushed after each line, so that a killed run loses nothing.

JSON has no NaN and no infinity. The value of such a field is ``null``, and ``"non_finite"`` has the actual value:
``{"kind": "step", "iteration": 7, "loss": null, ..., "non_finite": {"loss": "nan"}}``.
"""

import json
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megatron_core.errors import ConfigError
from megatron_core.monitor.events import ExpertLoad, StepEvent, ValidationEvent
from megatron_core.monitor.lenient import warn_unwritable
from megatron_core.output_file import Kind, is_still_at, json_lines, make_folder, no_follow, refuse_other_file

METRICS = json_lines("metrics file", b'{"kind": "')


class JsonLinesSink:
    """Appends every event to a file; a resumed run appends to the same file."""

    setting = "metrics_file"

    def __init__(self, path: str | Path) -> None:
        """Open ``path`` for appending, with its folder."""
        self._file = LineFile(path, self.setting, METRICS)

    def on_step(self, event: StepEvent) -> None:
        """Write one step."""
        record = asdict(event)
        losses = record.pop("auxiliary_losses") | record.pop("breakdown")
        loads = record.pop("expert_load")
        experts = {"experts": {str(layer): ExpertLoad.of(load).record() for layer, load in loads.items()}}
        shares = {"utilisation": event.utilisation}
        self._write({"kind": "step", **record, **shares, **losses, **(experts if loads else {})})

    def on_validation(self, event: ValidationEvent) -> None:
        """Write one evaluation."""
        self._write({"kind": "validation", **asdict(event), "perplexity": event.perplexity})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(as_json(record), allow_nan=False))


class LineFile:
    """A file to which lines are appended, each flushed; if the file is deleted, it is created again."""

    def __init__(
        self, path: str | Path, setting: str, file_kind: Kind, *, first: str = "", prints_note: bool = True
    ) -> None:
        """``first``: the first line of each process. ``prints_note``: print a note if the file is created again.

        Errors: ``ConfigError`` for a file of another kind, or one that cannot be written.
        """
        self._path, self._first, self._prints_note = Path(path), first, prints_note
        self._has_warned = False
        named = f"{setting}={str(path)!r}"
        try:
            refuse_other_file(named, path, file_kind)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"{named} cannot be written: {error}; give another file") from None

    def write(self, line: str) -> None:
        """Append a line. After an error, such as a full disk, the next call tries again."""
        if self._file.closed:
            self._file = self._open()
        # After a deletion, writes would go to a file without a name.
        elif not is_still_at(self._file.fileno(), self._path):
            if self._prints_note and (
                not self._path.parent.exists() or self._path.parent.stat().st_ino == self._folder
            ):
                print(f"note: {self._path} was deleted or renamed during training; it is created again", flush=True)
            self._file.close()
            self._file = self._open()
        self._append(line)

    def try_write(self, line: str, setting: str) -> None:
        """As ``write``; the first error is a warning that names ``setting``, because training continues without it."""
        try:
            self.write(line)
        except OSError as error:
            if not self._has_warned:
                warn_unwritable(setting, error)
            self._has_warned = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> TextIO:
        """Open the file for appending; first end a line cut off by a kill."""
        make_folder(self._path.parent)
        # Else the first record of this run would be a part of the damaged line, and be lost too.
        incomplete = _ends_within_line(self._path)
        self._file = open(self._path, "a", encoding="utf-8", opener=no_follow)  # noqa: SIM115 (open during the run)
        self._folder = self._path.parent.stat().st_ino
        if incomplete:
            self._file.write("\n")
        if self._first:
            self._append(self._first)
        return self._file

    def _append(self, line: str) -> None:
        try:
            self._file.write(f"{line}\n")
            self._file.flush()
        except OSError:
            with suppress(OSError):  # closing tries to write again
                self._file.close()
            raise


def as_json(record: dict[str, Any]) -> dict[str, Any]:
    """Replace values that are not finite by ``null``, and add ``non_finite``."""
    odd = {name: str(v) for name, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    if not odd:
        return record
    return {**record, **dict.fromkeys(odd), "non_finite": odd}


def _ends_within_line(path: Path) -> bool:
    """Whether the file's last line has no line break."""
    if not path.is_file() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
