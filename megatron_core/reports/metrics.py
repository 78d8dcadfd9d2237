"""Records of a run: the metrics file, and a file of times and memory for each rank; readers check every field.

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
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_core.config import RunConfig
from megatron_core.config.rules_single import illegal_values
from megatron_core.config.run import field_types
from megatron_core.config.values import convert
from megatron_core.errors import ConfigError, DataError, shortened, visible
from megatron_core.foreign_json import any_real, flag, items, mapping, maybe, numeric, table, text, whole, wrong
from megatron_core.monitor.sinks import METRICS, LineFile
from megatron_core.output_file import refuse_url

if TYPE_CHECKING:
    from megatron_core.reports.meter import StepTimes


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


SECONDS = numeric(0.0, 1e12)
TRAFFIC = table({"calls": numeric(), "bytes": numeric(), "exposed": SECONDS, "in_flight": SECONDS})
LOAD = table({"tokens": items(whole()), "dropped": whole(), "max_over_mean": numeric(), "entropy": numeric(0.0, 1.001)})

STEP = {
    "iteration": whole(), "total_iterations": whole(), "consumed_samples": whole(), "consumed_tokens": whole(),
    "loss": any_real, "learning_rate": numeric(), "global_batch_size": whole(1), "elapsed_ms": numeric(),
    "tokens_per_second": numeric(), "model_flops_per_second": numeric(),
}  # fmt: skip
STEP_OPTIONAL = {
    "loss_scale": numeric(), "grad_norm": maybe(any_real), "params_norm": maybe(any_real),
    "num_zeros_in_grad": maybe(numeric()), "memory_bytes": whole(), "skipped": flag, "phases": mapping(SECONDS),
    "memory": mapping(whole()), "goodput": maybe(numeric(0.0, 1.0)), "product_rate": maybe(numeric()),
    "utilisation": maybe(numeric()), "layout": maybe(text),
}  # fmt: skip
VALIDATION = {"iteration": whole(), "loss": any_real, "split": text}
VALIDATION_OPTIONAL = {
    "consumed_samples": whole(),
    "consumed_tokens": whole(),
    "perplexity": any_real,
    "accuracy": maybe(numeric(0.0, 1.0)),
    "accuracy_norm": maybe(numeric(0.0, 1.0)),
}
START = {"rank": whole(0, 2**20), "world_size": whole(1, 2**20)}
TIMES = {
    "first": whole(), "last": whole(), "at": SECONDS, "seconds": SECONDS, "phases": mapping(SECONDS),
    "traffic": mapping(TRAFFIC),
}  # fmt: skip
TIMES_OPTIONAL = {"memory": mapping(whole()), "gpu": mapping(numeric()), "skipped": whole(), "complete": flag}


def wrong_metrics(record: dict[str, Any]) -> list[str]:
    """Names of missing fields of a step or an evaluation, and of fields with a wrong type or range."""
    if record["kind"] == "validation":
        return wrong(record, VALIDATION, VALIDATION_OPTIONAL)
    added = set(record) - set(STEP) - set(STEP_OPTIONAL) - {"kind", "experts"}  # auxiliary losses, parts of metrics
    optional = {**STEP_OPTIONAL, **dict.fromkeys(sorted(added), maybe(any_real)), "experts": _is_load}
    return wrong(record, STEP, optional)


def checked_line(record: dict[str, Any]) -> dict[str, Any] | None:
    """Known fields of a line of a rank's file; None for another kind of line or a damaged one."""
    line_type = record.get("kind")
    if line_type not in ("start", "times"):
        return None
    fields, optional = (START, START_OPTIONAL) if line_type == "start" else (TIMES, TIMES_OPTIONAL)
    if wrong(record, fields, optional) or (line_type == "times" and not _is_stretch(record)):
        return None
    checked = {"kind": line_type} | {name: record[name] for name in (*fields, *optional) if name in record}
    return checked | {"config": _settings(checked["config"])} if "config" in checked else checked


def _is_stretch(record: dict[str, Any]) -> bool:
    """Whether the numbers of steps and skipped steps and the time of a record are consistent; it may have no steps."""
    steps = record["last"] - record["first"] + 1
    return steps == 0 or (steps > 0 and record["seconds"] > 0 and record.get("skipped", 0) <= steps)


def _is_load(value: Any) -> bool:
    """Whether ``value`` is the load by layer, with equal numbers of experts in all layers."""
    return (
        mapping(LOAD)(value)
        and all(layer.isascii() and layer.isdigit() and len(layer) < 8 for layer in value)
        and len({len(load["tokens"]) for load in value.values()}) <= 1
    )


def _is_config(value: Any) -> bool:
    """Whether the settings known to this version have legal values."""
    try:
        return not any(illegal_values(RunConfig.from_flat(RunConfig().flat() | _settings(value)).flat()))
    except (AttributeError, TypeError, ValueError, OverflowError, ConfigError):
        return False


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    """Settings known to this version, converted to their types."""
    kinds = field_types()
    return {name: convert(value, kinds[name]) for name, value in config.items() if name in kinds}


START_OPTIONAL = {
    "version": whole(), "coordinates": mapping(whole(0, 2**20)), "host": text, "device": text, "began": SECONDS,
    "iteration": whole(), "layout": maybe(text), "work": maybe(numeric()), "memory_total": whole(),
    "product_rate": maybe(numeric()), "rate_of": mapping(lambda value: True), "config": _is_config,
    "environment": mapping(lambda value: True),
}  # fmt: skip


VERSION = 1
DETAILED = 100
"""Number of steps of a process with a line of their own."""
Record = dict[str, Any]


class RankWriter:
    """Appends lines to this rank's file."""

    def __init__(self, metrics: Path, rank: int, about: Mapping[str, Any]) -> None:
        """``metrics``: the run's metrics file. ``about``: further fields of the header."""
        first = json.dumps({"kind": "start", "version": VERSION, "rank": rank, **about})
        self._file = LineFile(rank_metrics_file(metrics, rank), "metrics_file", METRICS, first=first, prints_note=False)

    def write(
        self,
        first_step: int,
        last_step: int,
        began: float,
        times: "StepTimes",
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


def rank_metrics_file(metrics: Path, rank: int) -> Path:
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


STARVED_SHARE, STARVED_STEPS = 0.05, 20
"""An expert starves if its load is below this share of the mean load in this number of consecutive steps."""


def recorded_loads(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    """Return the load by layer of each step with the same layers and experts as the last step.

    A run may be continued with other layers or experts.
    """
    recorded = [step["experts"] for step in steps if step.get("experts")]
    shapes = [{layer: len(load["tokens"]) for layer, load in loads.items()} for loads in recorded]
    return [loads for loads, shape in zip(recorded, shapes, strict=True) if shape == shapes[-1]]
