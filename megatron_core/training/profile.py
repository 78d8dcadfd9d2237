"""--profile: activities of each rank in selected steps, merged into one trace."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from megatron_core.monitor.chrome_trace import events_of, merge, profiler_events, rank_trace, write_events
from megatron_core.output_file import TRACE, refuse_other_file
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.meter import METER, StepTimes, unix_time
from megatron_core.schedules.draw import tracks
from megatron_core.training.setup import Run


class Profile:
    """Collects events of the steps after ``profile_step_start`` up to ``profile_step_end``; one object per rank."""

    def __init__(self, run: Run) -> None:
        self.run, self.settings = run, run.config.monitor
        self.folder = Path(self.settings.profile_dir or (run.config.checkpoint.run_folder or Path(".")) / "profile")
        self._wanted = self.settings.profile
        self._own = not self.settings.profile_ranks or run.world.rank in self.settings.profile_ranks
        if self._wanted and self._own:
            paths = [rank_trace(self.folder, run.world.rank), self.folder / "trace.json"]
            for path in paths[: 2 if run.world.rank == 0 else 1]:
                refuse_other_file(f"profile_dir={str(self.folder)!r}", path, TRACE)
        self._events: list[dict[str, Any]] = []
        self._profiler: Any = None
        self._begin_at(run.state.iteration)

    def after_step(self, times: StepTimes) -> None:
        """Collect events of the last step; write all after the final one. ``times``: the result of ``METER.take``."""
        iteration = self.run.state.iteration
        if METER.keep_spans:
            rank, began = self.run.world.rank, unix_time() - times.seconds
            self._events += events_of(METER.spans, rank, began)
            for track, flights in enumerate(tracks(METER.flights), start=1):
                self._events += events_of(flights, rank, began, track=track)
        if self._wanted and iteration >= self.settings.profile_step_end:
            self.finish()
        self._begin_at(iteration)

    def finish(self) -> None:
        """Write the collected events; all ranks call this together, and rank 0 merges the files."""
        run, settings = self.run, self.settings
        if not self._wanted:
            return
        self._wanted, METER.keep_spans = False, False
        if self._own:
            if self._profiler is not None:
                self._profiler.stop()
                self._events += self._exported()
            write_events(rank_trace(self.folder, run.world.rank), self._events)
        all_reduce_(torch.zeros(1, device=run.world.device), run.groups.group(WORLD))
        if run.world.rank == 0:
            path, missing = merge(self.folder, settings.profile_ranks or range(run.world.size))
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
