"""Records of each rank's time and memory: writing, and reading the records of a run.

``metrics.ranks/rank00003.jsonl`` next to ``metrics.jsonl``: a header for each start, then lines for ranges of steps.

    {"kind": "start", "version": 1, "rank": 3, "world_size": 4, "coordinates": {"tp": 1, ...}, "host": "node0", ...}
    {"kind": "times", "first": 1, "last": 1, "at": 1.7e9, "seconds": 0.041, "phases": {"forward": 0.012, ...},
     "traffic": {"tp all_reduce": {"calls": 8, "bytes": 65536.0, "exposed": 0.003, "in_flight": 0.003}},
     "memory": {"weights": 1048576, ...}, "skipped": 0}

``at`` is Unix time at the end of the range. The last line of a completed run has ``"complete": true``.
"""

# Each of the first ``DETAILED`` steps of a process has its own line; later lines cover ``log_interval`` steps, which
# keeps the files of a long run small. Ranks write independently, so that the files of a killed run, or of only some
# ranks, are usable.

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_core.errors import DataError, shortened, visible
from megatron_core.monitor.jsonl import METRICS, LineFile
from megatron_core.output_file import refuse_url
from megatron_core.parallel.meter import StepTimes
from megatron_core.reports.metrics import read_metrics
from megatron_core.reports.record_schema import checked_line

VERSION = 1
DETAILED = 100
"""Number of steps of a process with a line of their own."""
Record = dict[str, Any]


class RankWriter:
    """Appends lines to this rank's file."""

    def __init__(self, metrics: Path, rank: int, about: Mapping[str, Any]) -> None:
        """``metrics``: the run's metrics file. ``about``: further fields of the header."""
        first = json.dumps({"kind": "start", "version": VERSION, "rank": rank, **about})
        self._file = LineFile(rank_file(metrics, rank), "metrics_file", METRICS, first=first, prints_note=False)

    def write(
        self,
        first_step: int,
        last_step: int,
        began: float,
        times: StepTimes,
        memory: Mapping[str, int],
        skipped: int,
        complete: bool = False,
        gpu: Mapping[str, float] = MappingProxyType({}),
    ) -> Record:
        """Append the range of steps ``first_step`` to ``last_step``, and the ``gpu_state`` at its end; return its
        record."""
        record: Record = {
            "kind": "times", "first": first_step, "last": last_step,
            "at": round(began, 3), "seconds": _short(times.seconds),
            "phases": {name: _short(seconds) for name, seconds in times.phases.items()},
            "traffic": {name: {k: _short(v) for k, v in asdict(t).items()} for name, t in times.traffic.items()},
            "memory": dict(memory), "skipped": skipped, **({"complete": True} if complete else {}),
            **({"gpu": {name: _short(value) for name, value in gpu.items()}} if gpu else {}),
        }  # fmt: skip
        self._file.try_write(json.dumps(record), "record_times")
        return record

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class RunRecords:
    """All records of a run."""

    metrics: list[Record]
    """Steps and evaluations, as returned by ``read_metrics``."""
    ranks: dict[int, list[Record]]
    """Lines of each rank's file in the order of writing, including repeated steps."""
    notes: list[str] = field(default_factory=list)
    """Missing or unreadable records."""

    def steps(self) -> list[Record]:
        """The records of steps."""
        return [record for record in self.metrics if record["kind"] == "step"]

    def header(self, rank: int | None = None) -> Record:
        """Header of the last process of ``rank``, by default the lowest recorded rank; empty without records."""
        lines = self.ranks.get(min(self.ranks, default=0) if rank is None else rank, [])
        return next((line for line in reversed(lines) if line["kind"] == "start"), {})


def rank_file(metrics: Path, rank: int) -> Path:
    """Path of a rank's file."""
    return metrics.with_suffix(".ranks") / f"rank{rank:05d}.jsonl"


def find_metrics(run: str | Path) -> Path:
    """Find the metrics file of a run from its path or its folder. ``DataError`` if there is none, ``ConfigError`` for
    a URL."""
    refuse_url(str(run), run)
    path = Path(run)
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file() and not file.with_suffix(".ranks").is_dir():
        raise DataError(f"{run} has no records of a run; give the folder of --save or the file of --metrics-file")
    return file


def read_run(run: str | Path) -> RunRecords:
    """Read all available records of a run; missing records are described in the notes."""
    path, notes = find_metrics(run), []
    metrics: list[Record] = []
    if path.is_file():
        metrics = read_metrics(path)
    else:
        notes.append(f"{path.name} is missing: losses and throughput are unknown")
    ranks: dict[int, list[Record]] = {}
    for file in sorted(path.with_suffix(".ranks").glob("*.jsonl")):
        if not re.fullmatch("rank[0-9]{5,7}", file.stem):
            notes.append(f"{visible(file.name)} is not named as a rank's file, such as rank00000.jsonl; ignored")
        elif lines := read_rank_file(file, notes):
            ranks[int(file.stem.removeprefix("rank"))] = lines
    if not metrics and not ranks and path.is_file() and path.stat().st_size:
        raise DataError(f"{path} has no records of a run; give the folder of --save or the file of --metrics-file")
    records = RunRecords(metrics, ranks, notes)
    world = records.header().get("world_size", 0)
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        examples = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        notes.append(f"records of {len(missing)} of {world} ranks are missing ({examples})")
    if not ranks:
        notes.append("no rank recorded its times (--no-record-times): there is no breakdown of time")
    return records


def read_rank_file(file: Path, notes: list[str]) -> list[Record]:
    """Return the readable lines of one file; add a sentence about the other lines to ``notes``."""
    records, damaged, other = [], 0, set()
    version: Any = VERSION
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror}); ignored")
        return []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and record.get("kind") == "start":
            version = record.get("version")
        if isinstance(record, dict) and version != VERSION:
            other.add(shortened(str(version), 40))
        elif isinstance(record, dict) and (checked := checked_line(record)) is not None:
            records.append(checked)
        else:
            damaged += 1
    if damaged:
        plural = "s are" if damaged > 1 else " is"
        notes.append(
            f"{file.name}: {damaged} line{plural} damaged or cut off, for example because a process was killed; ignored"
        )
    if other:
        names = ", ".join(sorted(other)[:8])
        notes.append(f"{file.name} has records of version {names}, this program reads {VERSION}; ignored")
    return records


def _short(number: float) -> float:
    """Round to seven digits."""
    return float(f"{number:.7g}")
