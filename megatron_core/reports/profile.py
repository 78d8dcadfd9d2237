"""--profile: activities of each rank in selected steps, merged into one trace in Chrome's trace event format.

Each rank is a process with a track of computation and of waiting for collectives, by phase and pipeline action, and
with tracks of the collectives in flight: where these are below computation, they are hidden. Below them are the events
of torch.profiler with its threads and streams. Times are in microseconds of the hosts' clocks.
"""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_core.output_file import make_folder, no_follow, refuse_other_file
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.meter import unix_time
from megatron_core.prepared_output import TRACE
from megatron_core.reports.meter import METER, PhaseSpan
from megatron_core.reports.settings import ProfileConfig
from megatron_core.reports.timelines import IN_FLIGHT, complete_event, tracks
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult

Event = dict[str, Any]
PIDS = 1000
"""Number of process identifiers reserved for each rank."""


class Profile(Callback):
    """Collects events of the steps after ``profile_step_start`` up to ``profile_step_end``; one object per rank."""

    priority = 590  # after Reports, which end the measured step

    def __init__(self, run: Run) -> None:
        self.run = run
        self.settings = run.config.section(ProfileConfig)
        self.folder = Path(self.settings.profile_dir or (run.config.checkpoint.run_folder or Path(".")) / "profile")
        self._wanted = True
        self._own = not self.settings.profile_ranks or run.world.rank in self.settings.profile_ranks
        self._events: list[dict[str, Any]] = []
        self._profiler: Any = None

    def before_run(self) -> None:
        """Refuse other files in the place of the trace, and begin if the first step is traced."""
        if self._own:
            paths = [rank_trace(self.folder, self.run.world.rank), self.folder / "trace.json"]
            for path in paths[: 2 if self.run.world.rank == 0 else 1]:
                refuse_other_file(f"profile_dir={str(self.folder)!r}", path, TRACE)
        self._begin_at(self.run.state.iteration)

    def after_step(self, result: StepResult) -> None:
        """Collect events of the last step; write all after the final one."""
        iteration = self.run.state.iteration
        if METER.keep_spans:
            rank = self.run.world.rank
            began = unix_time() - METER.spans[-1].end
            self._events += events_of(METER.spans, rank, began)
            for track, flights in enumerate(tracks(METER.flights), start=1):
                self._events += events_of(flights, rank, began, track=track)
        if self._wanted and iteration >= self.settings.profile_step_end:
            self.after_run()
        self._begin_at(iteration)

    def after_run(self) -> None:
        """Write the collected events; all ranks call this together, and rank 0 merges the files."""
        run = self.run
        settings = self.settings
        if not self._wanted:
            return
        self._wanted = False
        METER.keep_spans = False
        if self._own:
            if self._profiler is not None:
                self._profiler.stop()
                self._events += self._exported()
            write_events(rank_trace(self.folder, run.world.rank), self._events)
        all_reduce_(torch.zeros(1, device=run.world.device), run.groups.group(WORLD))
        if run.world.rank == 0:
            path, missing = merge_traces(self.folder, settings.profile_ranks or range(run.world.size))
            note = f"; no file of ranks {missing}, on other hosts perhaps" if missing else ""
            print(f"wrote {path}: open it in ui.perfetto.dev{note}", flush=True)

    def _begin_at(self, iteration: int) -> None:
        start = max(self.settings.profile_step_start, 0)
        if not self._wanted or not self._own or METER.keep_spans or iteration < start:
            return
        METER.keep_spans = True
        if self.settings.use_pytorch_profiler:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self.run.world.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(
                activities=activities,
                record_shapes=self.settings.pytorch_profiler_collect_shapes,
                with_stack=self.settings.pytorch_profiler_collect_callstack,
            )
            self._profiler.start()

    def _exported(self) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return profiler_events(json.loads(path.read_text(encoding="utf-8")), self.run.world.rank)


def events_of(spans: Iterable[PhaseSpan], rank: int, began: float, *, track: int = 0) -> list[Event]:
    """Return complete events for the spans of a step that started at the Unix time ``began``.

    Track 0 is the rank's time, and later ones are its collectives in flight, with the microseconds in which the rank
    only waited for each.
    """
    category = IN_FLIGHT if track else "step"
    events = []
    for span in spans:
        about: dict[str, Any] = {} if span.detail is None else {"action": str(span.detail)}
        if track:
            about["waited_us"] = 1e6 * span.waited
        interval = (1e6 * (began + span.start), 1e6 * (began + span.end))
        events.append(complete_event(span.phase, category, rank * PIDS, track, *interval, about))
    return events


def profiler_events(exported: dict[str, Any], rank: int) -> list[Event]:
    """Events exported by torch.profiler, with process identifiers of this rank and times of the host's clock."""
    base = exported.get("baseTimeNanoseconds", 0) / 1e3
    pids: dict[Any, int] = {}
    events = []
    for event in exported.get("traceEvents", []):
        pid = pids.setdefault(event.get("pid"), rank * PIDS + 1 + len(pids))
        if event.get("ph") == "M":
            if event.get("name") == "process_name":
                event = event | {"args": {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}}
            events.append(event | {"pid": pid})
        elif "ts" in event:
            events.append(event | {"pid": pid, "ts": float(event["ts"]) + base})
    return events


def rank_trace(folder: Path, rank: int) -> Path:
    """Path of the file of a rank's events."""
    return folder / f"rank{rank:05d}.json"


def write_events(path: Path, events: Sequence[Event]) -> None:
    """Write events to a file."""
    make_folder(path.parent)
    refuse_other_file(f"{path} cannot be written", path, TRACE)
    with open(path, "w", encoding="utf-8", opener=no_follow) as file:
        file.write(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))


def merge_traces(folder: Path, ranks: Iterable[int]) -> tuple[Path, list[int]]:
    """Merge the ranks' files into ``trace.json``, with time 0 at the first event.

    Returns its path and the ranks without a file.
    """
    events = list[Event]()
    missing = []
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
