"""What each rank writes of its own time and memory, and how the records of a run are read again.

Beside ``metrics.jsonl`` lies the folder ``metrics.ranks`` with a file for each rank, ``rank00003.jsonl``. Every process
that starts appends a line that says who it is, and then one line for each stretch of steps:

    {"kind": "start", "version": 1, "rank": 3, "world_size": 4, "coordinates": {"tp": 1, ...}, "host": "node0", ...}
    {"kind": "times", "first": 1, "last": 1, "at": 1.7e9, "seconds": 0.041, "phases": {"forward": 0.012, ...},
     "traffic": {"tp all_reduce": {"calls": 8, "bytes": 65536.0, "exposed": 0.003, "in_flight": 0.003}},
     "memory": {"weights": 1048576, ...}, "skipped": 0}

``at`` is Unix time at the end of the stretch. The first ``DETAILED`` steps of a process have a line each, later ones
share one for every ``log_interval`` steps, so that a long run's files stay small. The last line of a run that did all
its iterations says ``"complete": true``. Ranks write without asking others, so that the files of a run that was killed,
or of some ranks alone, still say what they know.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_core.errors import DataError, shortened, visible
from megatron_core.monitor.jsonl import METRICS, LineFile, read_metrics
from megatron_core.monitor.lenient import tell_unwritable
from megatron_core.monitor.record_schema import checked_line
from megatron_core.parallel.meter import StepTimes

VERSION = 1
DETAILED = 100
"""Steps of a process that have a line each."""
Record = dict[str, Any]


class RankWriter:
    """Appends this rank's lines."""

    def __init__(self, metrics: Path, rank: int, about: Mapping[str, Any]) -> None:
        """``metrics`` is the run's metrics file, ``about`` what the first line says besides."""
        first = json.dumps({"kind": "start", "version": VERSION, "rank": rank, **about})
        self._file = LineFile(rank_file(metrics, rank), "metrics_file", METRICS, first=first, says=False)
        self._is_told = False

    def write(
        self,
        first: int,
        last: int,
        at: float,
        times: StepTimes,
        memory: Mapping[str, int],
        skipped: int,
        complete: bool = False,
    ) -> Record:
        """Append the stretch of steps ``first`` to ``last``; returns its record."""
        record: Record = {
            "kind": "times", "first": first, "last": last, "at": round(at, 3), "seconds": _short(times.seconds),
            "phases": {name: _short(seconds) for name, seconds in times.phases.items()},
            "traffic": {name: {k: _short(v) for k, v in asdict(t).items()} for name, t in times.traffic.items()},
            "memory": dict(memory), "skipped": skipped, **({"complete": True} if complete else {}),
        }  # fmt: skip
        try:
            self._file.write(json.dumps(record))
        except OSError as error:
            if not self._is_told:
                tell_unwritable("record_times", error)
            self._is_told = True
        return record

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class RunRecords:
    """All that a run has left."""

    metrics: list[Record]
    """Steps and evaluations, as ``read_metrics`` gives them."""
    ranks: dict[int, list[Record]]
    """Lines of each rank's file in the order in which they were written, those of repeated steps included."""
    notes: list[str] = field(default_factory=list)
    """What is missing or could not be read."""

    def steps(self) -> list[Record]:
        """The records of steps."""
        return [record for record in self.metrics if record["kind"] == "step"]

    def header(self, rank: int | None = None) -> Record:
        """What the last process of a rank, by default the lowest there is, said of itself; empty if nothing."""
        lines = self.ranks.get(min(self.ranks, default=0) if rank is None else rank, [])
        return next((line for line in reversed(lines) if line["kind"] == "start"), {})


def rank_file(metrics: Path, rank: int) -> Path:
    """Where a rank's lines are."""
    return metrics.with_suffix(".ranks") / f"rank{rank:05d}.jsonl"


def find_metrics(run: str | Path) -> Path:
    """The metrics file of a run that is named by its file or by its folder. ``DataError`` if there is none."""
    path = Path(run)
    found = path / "metrics.jsonl" if path.is_dir() else path
    if not found.is_file() and not found.with_suffix(".ranks").is_dir():
        raise DataError(f"{run} has no records of a run; give the folder of --save or the file of --metrics-file")
    return found


def read_run(run: str | Path) -> RunRecords:
    """The records of a run, as far as they go; what is missing is in the notes."""
    path, notes = find_metrics(run), []
    metrics: list[Record] = []
    if path.is_file():
        metrics = read_metrics(path)
    else:
        notes.append(f"{path.name} is missing: losses and throughput are unknown")
    ranks: dict[int, list[Record]] = {}
    for file in sorted(path.with_suffix(".ranks").glob("*.jsonl")):
        if not re.fullmatch("rank[0-9]{5,7}", file.stem):
            notes.append(f"{visible(file.name)} is not named as a rank's file, such as rank00000.jsonl; left out")
        elif lines := read_rank_file(file, notes):
            ranks[int(file.stem.removeprefix("rank"))] = lines
    if not metrics and not ranks and path.is_file() and path.stat().st_size:
        raise DataError(f"{path} has no records of a run; give the folder of --save or the file of --metrics-file")
    records = RunRecords(metrics, ranks, notes)
    world = records.header().get("world_size", 0)
    missing = sorted(set(range(world)) - set(ranks))
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        notes.append(f"records of {len(missing)} of {world} ranks are missing ({shown}): what they did is unknown")
    if not ranks:
        notes.append("no rank has recorded its times (--no-record-times): where they went is unknown")
    return records


def read_rank_file(file: Path, notes: list[str]) -> list[Record]:
    """The lines of one file that can be read; a sentence about the others is added to ``notes``."""
    found, damaged, other = [], 0, set()
    version: Any = VERSION
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        notes.append(f"{file.name} cannot be read ({error.strerror}); left out")
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
            found.append(checked)
        else:
            damaged += 1
    if damaged:
        plural = "s are" if damaged > 1 else " is"
        notes.append(f"{file.name}: {damaged} line{plural} damaged or cut off, as when a process is killed; left out")
    if other:
        names = ", ".join(sorted(other)[:8])
        notes.append(f"{file.name} has records of version {names}, this program reads {VERSION}; those are left out")
    return found


def _short(number: float) -> float:
    """Seven digits are enough."""
    return float(f"{number:.7g}")
