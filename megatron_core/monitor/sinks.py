"""The sinks of a run, which continue without a destination that fails, and metrics as JSON Lines.

A file of JSON Lines has one object per line, flushed after each line, so that a killed run loses nothing.

JSON has no NaN and no infinity. The value of such a field is ``null``, and ``"non_finite"`` has the actual value:
``{"kind": "step", "iteration": 7, "loss": null, ..., "non_finite": {"loss": "nan"}}``.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO, cast

from megatron_core.config import RunConfig
from megatron_core.config.monitor import MonitorConfig
from megatron_core.errors import ConfigError
from megatron_core.feature import load_hook, used_features
from megatron_core.monitor.events import ExpertLoad, Sink, StepEvent, ValidationEvent
from megatron_core.output_file import Kind, is_still_at, json_lines, make_folder, no_follow, refuse_other_file
from megatron_core.terminal import discard


class LenientSink:
    """Passes events to ``sink``; warns at the first failed write, and tries again with each event."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._has_warned = sink, False
        self.setting = sink.setting

    def on_step(self, event: StepEvent) -> None:
        """Pass one step."""
        self._try(lambda: self._sink.on_step(event))

    def on_validation(self, event: ValidationEvent) -> None:
        """Pass one evaluation."""
        self._try(lambda: self._sink.on_validation(event))

    def close(self) -> None:
        """Close the sink."""
        self._try(self._sink.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            if not self._has_warned:
                warn_unwritable(self.setting, error)
            self._has_warned = True


@contextmanager
def lenient_output() -> Iterator[None]:
    """Let training continue in this context if standard output is full or closed."""
    # print() raises if the disk of a log file is full; hours of training are worth more than its lines.
    strict = sys.stdout
    sys.stdout = cast(TextIO, _Stream(strict))
    try:
        yield
    finally:
        sys.stdout = strict


class _Stream:
    """A text stream that discards output after a failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``."""
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            discard(self._stream)
            warn_unwritable("standard output", error)


def warn_unwritable(name: str, error: OSError) -> None:
    """Warn on standard error that ``name`` is not written."""
    with suppress(OSError):
        print(f"note: {name} cannot be written: {error.strerror}; training continues", file=sys.stderr, flush=True)


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


@dataclass(frozen=True)
class SinkContext:
    """The arguments of ``Feature.sink``."""

    config: RunConfig
    """The settings of the run."""
    folder: Path | None = None
    """The folder of its checkpoints."""
    start_iteration: int = 0
    """The iteration from which the run continues."""
    logged: Mapping[str, Any] = field(default_factory=dict)
    """Settings to store with the metrics."""

    @property
    def metrics_path(self) -> Path | None:
        """Path of the metrics file."""
        return metrics_path(self.config.monitor, self.folder)


def build_sinks(context: SinkContext) -> list[Sink]:
    """Create the metrics file, if it is set or checkpoints are saved, and the sinks of features.

    Call it on the reporting rank.
    """
    path = context.metrics_path
    sinks: list[Sink] = [] if path is None else [JsonLinesSink(path)]
    hooks = (feature.sink for feature in used_features(context.config) if feature.sink is not None)
    return sinks + [load_hook(hook)(context) for hook in hooks]


def metrics_path(config: MonitorConfig, save_dir: str | Path | None) -> Path | None:
    """Path of the metrics file: ``metrics_file``, or ``metrics.jsonl`` in ``save_dir``."""
    if config.metrics_file is not None:
        return Path(config.metrics_file)
    return None if save_dir is None else Path(save_dir) / "metrics.jsonl"
