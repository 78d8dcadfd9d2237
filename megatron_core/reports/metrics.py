"""Reads the metrics file of a run."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_core.errors import DataError
from megatron_core.reports.record_schema import wrong_metrics


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of one training in order, without superseded records.

    A run that resumes from a checkpoint repeats the steps after it: the last record of each iteration is kept, and
    earlier records after the checkpoint are removed. A line cut off by a kill is ignored.
    """
    current: list[dict[str, Any]] = []
    for record in _records(Path(path)):
        while current and _is_superseded(current[-1], record):
            current.pop()
        current.append(record)
    return current


def _is_superseded(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether ``new`` is at or before the iteration of ``old``."""
    if new["kind"] == "step":
        return old["iteration"] >= new["iteration"]
    same_kind = old["kind"] == "validation" and old["split"] == new["split"]
    return old["iteration"] > new["iteration"] or (same_kind and old["iteration"] == new["iteration"])


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Read all records of a file in order."""
    try:
        if os.path.exists(path) and not path.is_file():
            raise OSError(0, "it is not a regular file")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", error)
        raise DataError(f"metrics file {path} cannot be read: {reason}; give a run's metrics.jsonl") from error
    for number, record in parsed_lines(lines):
        if record.get("kind") in ("step", "validation"):
            try:
                record = from_json(record)
                names = wrong_metrics(record)
            except (ValueError, TypeError, AttributeError):
                names = ["non_finite"]
            if names:
                examples = ", ".join(names[:3]) + ", ..." * (len(names) > 3)
                raise DataError(f"{path}, line {number} is not a record of a run: missing or out of range: {examples}")
            yield record


def parsed_lines(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in lines of JSON with the numbers of their lines; a line that a kill has cut off is left out."""
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield number, record


def from_json(record: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``as_json``."""
    odd = record.pop("non_finite", {})
    return {**record, **{name: float(text) for name, text in odd.items()}}
