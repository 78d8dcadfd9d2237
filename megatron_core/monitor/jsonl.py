"""Metrics as JSON Lines: one object a line, appended and flushed, so that a killed run loses nothing.

JSON has no NaN and no infinity. Such a number is ``null`` under its name, and ``"non_finite"`` says which
it was: ``{"kind": "step", "iteration": 7, "loss": null, ..., "non_finite": {"loss": "nan"}}``.
"""

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from megatron_core.errors import DataError
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.monitor.expert_load import ExpertLoad


class JsonLinesSink:
    """Appends every event to a file; a resumed run appends to the same file."""

    setting = "metrics_file"

    def __init__(self, path: str | Path) -> None:
        """Open ``path`` for appending, with its folder."""
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_lines(self._path)

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
        if self._file.closed:
            self._file = open_lines(self._path)
        try:
            self._file.write(json.dumps(_as_json(record), allow_nan=False) + "\n")
            self._file.flush()
        except OSError:
            with suppress(OSError):  # it tries to write once more
                self._file.close()
            raise


def open_lines(path: Path) -> TextIO:
    """``path`` for appending lines; one that was cut off when a run was killed is ended first."""
    incomplete = _ends_within_line(path)
    file = path.open("a", encoding="utf-8")
    if incomplete:
        file.write("\n")
    return file


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of one training in order, without what was repeated later.

    A run that resumes from a checkpoint repeats the steps after it: of each iteration the last record stays,
    and what the lost run recorded after the checkpoint goes. A line cut off when a run was killed is ignored.
    """
    kept: list[dict[str, Any]] = []
    for record in _records(Path(path)):
        while kept and _is_superseded(kept[-1], record):
            kept.pop()
        kept.append(record)
    return kept


def _is_superseded(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether ``new`` repeats ``old`` or goes back before it."""
    if new["kind"] == "step":
        return old["iteration"] >= new["iteration"]
    same_kind = old["kind"] == "validation" and old["split"] == new["split"]
    return old["iteration"] > new["iteration"] or (same_kind and old["iteration"] == new["iteration"])


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of one file as they stand."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"metrics file {path} cannot be read: {error.strerror}; give a run's metrics.jsonl") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off in the middle of a write
        if isinstance(record, dict) and record.get("kind") in ("step", "validation"):
            try:
                record = _from_json(record)
            except (ValueError, TypeError, AttributeError):
                record = {}
            wrong = [name for name in ("iteration", "loss") if type(record.get(name)) not in (int, float)]
            if wrong:
                raise DataError(f"{path}, line {number} is no record of a run: {' and '.join(wrong)} must be numbers")
            yield record


def _as_json(record: dict[str, Any]) -> dict[str, Any]:
    """``record`` with ``null`` for numbers that JSON lacks."""
    odd = {name: str(v) for name, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    if not odd:
        return record
    return {**record, **dict.fromkeys(odd), "non_finite": odd}


def _from_json(record: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``_as_json``."""
    odd = record.pop("non_finite", {})
    return {**record, **{name: float(text) for name, text in odd.items()}}


def _ends_within_line(path: Path) -> bool:
    """Whether the file's last line has no end."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
