"""Traces of all ranks as one file for Perfetto (ui.perfetto.dev) or chrome://tracing, in Chrome's trace event format.

Each rank is a process with a track of computation and of waiting for collectives, by phase and pipeline action, and
with tracks of the collectives in flight: where these are below computation, they are hidden. Below them are the events
of torch.profiler with its threads and streams. Times are in microseconds of the hosts' clocks.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_core.output_file import TRACE, make_folder, no_follow, refuse_other_file
from megatron_core.parallel.meter import Span
from megatron_core.schedules.draw import IN_FLIGHT

Event = dict[str, Any]
PIDS = 1000
"""Number of process identifiers reserved for each rank."""


def events_of(spans: Iterable[Span], rank: int, began: float, *, track: int = 0) -> list[Event]:
    """Return complete events for the spans of a step that started at the Unix time ``began``.

    Track 0 is the rank's time, and later ones are its collectives in flight, with the microseconds in which the rank
    only waited for each.
    """

    def about(span: Span) -> dict[str, Any]:
        action = {} if span.detail is None else {"action": str(span.detail)}
        return action | {"waited_us": 1e6 * span.waited} if track else action

    return [
        {
            "ph": "X", "pid": rank * PIDS, "tid": track, "cat": IN_FLIGHT if track else "step",
            "ts": 1e6 * (began + span.start), "dur": 1e6 * (span.end - span.start), "name": span.phase,
            "args": about(span),
        }
        for span in spans
    ]  # fmt: skip


def profiler_events(exported: dict[str, Any], rank: int) -> list[Event]:
    """Events exported by torch.profiler, with process identifiers of this rank and times of the host's clock."""
    base = exported.get("baseTimeNanoseconds", 0) / 1e3
    pids: dict[Any, int] = {}
    found = []
    for event in exported.get("traceEvents", []):
        pid = pids.setdefault(event.get("pid"), rank * PIDS + 1 + len(pids))
        if event.get("ph") == "M":
            if event.get("name") == "process_name":
                event = event | {"args": {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}}
            found.append(event | {"pid": pid})
        elif "ts" in event:
            found.append(event | {"pid": pid, "ts": float(event["ts"]) + base})
    return found


def rank_trace(folder: Path, rank: int) -> Path:
    """Path of the file of a rank's events."""
    return folder / f"rank{rank:05d}.json"


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write events to a file."""
    make_folder(path.parent)
    refuse_other_file(f"{path} cannot be written", path, TRACE)
    with open(path, "w", encoding="utf-8", opener=no_follow) as file:
        file.write(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))


def merge(folder: Path, ranks: Iterable[int]) -> tuple[Path, list[int]]:
    """Merge the ranks' files into ``trace.json``, with time 0 at the first event.

    Returns its path and the ranks without a file.
    """
    events, missing = list[Event](), []
    for rank in ranks:
        path = rank_trace(folder, rank)
        if not path.is_file():
            missing.append(rank)
            continue
        name = {"ph": "M", "name": "process_name", "pid": rank * PIDS, "args": {"name": f"rank {rank}"}}
        order = {"ph": "M", "name": "process_sort_index", "pid": rank * PIDS, "args": {"sort_index": rank * PIDS}}
        events += [name, order, *json.loads(path.read_text(encoding="utf-8"))["traceEvents"]]
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    merged = [event | {"ts": round(event["ts"] - first, 3)} if "ts" in event else event for event in events]
    write_events(folder / "trace.json", merged)
    return folder / "trace.json", missing
