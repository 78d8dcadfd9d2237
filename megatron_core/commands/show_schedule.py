"""Draw pipeline schedules, and print their time and memory.

megatron-show-schedule --schedule zb_h1 --pipeline-size 4 --microbatches 8

megatron-show-schedule --compare 1f1b,zb_h1,zb_v --pipeline-size 4 --microbatches 8 --png schedules.png

megatron-show-schedule --measured traces --png measured.png
"""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("show_schedule")

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.features.pipeline_schedules.plan_file import read_plan
from megatron_core.output_file import Output
from megatron_core.planner.simulate import Costs, StageCosts, Timeline, peak_activations, simulate
from megatron_core.prepared_output import TRACE, json_with, picture_kind, prepare_output
from megatron_core.reports.timelines import chrome_trace, timeline_picture
from megatron_core.reports.trace_files import measured_costs, read_trace
from megatron_core.schedules import make_plan, schedules
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.checks import check_plan
from megatron_core.terminal import colours, parse_flags


@dataclass(frozen=True, kw_only=True)
class ScheduleFlags:
    """Draw pipeline schedules, and print their time and memory."""

    schedule: str = "1f1b"
    """Schedule to draw: gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, dualpipe_v or forward_only."""
    compare: str | None = None
    """Draw several schedules instead, separated by commas."""
    plan: str | None = None
    """File with a custom plan, one line of actions (such as 2F0) for each rank; drawn after those of --compare."""
    pipeline_size: int = 4
    """Number of pipeline ranks."""
    microbatches: int = 8
    """Number of micro-batches in a step."""
    chunks: int | None = None
    """Chunks of layers per rank; default: as the schedule requires, 2 for interleaved."""
    paired: bool = False
    """Run forwards together with backwards, as --overlap-moe-expert-parallel-comm; schedules without pairs are drawn
    unchanged by --compare."""
    costs: str = "1,1,1,0"
    """F,I,W,COMM,EXCHANGE: times of forward, input gradient and weight gradient of a micro-batch in all layers of a
    rank, and of a message between ranks; EXCHANGE, the part of F and of I that waits for messages between experts,
    which a pair hides."""
    measured: str | None = None
    """Folder of --trace-pipeline: instead of --schedule, draw a measured step in ms, and above it the same plan
    simulated with the measured times."""
    step: int | None = None
    """Step of --measured; default: the step with the median makespan."""
    rank: int = 0
    """With --measured: a global rank of the pipeline to draw."""
    png: str | None = None
    """Write a picture to this file."""
    trace: str | None = None
    """Write a Chrome trace to this file (one schedule, or --measured with its plan; a unit of time is 1 ms)."""
    json: str | None = None
    """Write the figures as JSON to this file; without a file, or with -, print them instead of the picture."""


@dataclass(frozen=True)
class Shown:
    """A schedule to draw."""

    name: str
    timeline: Timeline
    costs: Costs | StageCosts

    @property
    def title(self) -> str:
        """Name and sizes."""
        plan = self.timeline.plan
        chunks = f", {plan.num_chunks} chunks" if plan.num_chunks > 1 else ""
        pairs = ", in pairs" if plan.paired else ""
        return f"{self.name}: {len(plan.ranks)} ranks{chunks}, {plan.num_microbatches} micro-batches{pairs}"


def show_schedule(settings: ScheduleFlags) -> None:
    """Simulate or read the schedules, and write all requested outputs."""
    kinds = {"trace": TRACE, "json": json_with("file of figures of schedules", "schedule", "bubble")}
    outputs: dict[str, Output] = {}
    for name, path in (("png", settings.png), ("trace", settings.trace), ("json", settings.json)):
        if path not in (None, "-"):
            outputs[name] = prepare_output(settings, name, kinds[name] if name in kinds else picture_kind(path))
    drawings = simulated(settings) if settings.measured is None else measured(settings)
    if settings.trace is not None and settings.measured is None and len(drawings) > 1:
        raise ConfigError(f"trace={settings.trace!r} can hold only one schedule; remove --compare")
    if settings.png is not None:
        from megatron_core.reports.plot import plot_timelines  # importing matplotlib takes a while

        unit = "" if settings.measured is None else "ms"
        plot_timelines([(drawing.title, drawing.timeline) for drawing in drawings], settings.png, unit=unit)
    if settings.trace is not None:
        outputs["trace"].write(json.dumps(trace(drawings)) + "\n")
    if settings.json is not None:
        values = [figures(drawing) for drawing in drawings]
        text = json.dumps(values[0] if len(values) == 1 else values, indent=2) + "\n"
        if settings.json == "-":
            print(text, end="")
        else:
            outputs["json"].write(text)
    if settings.json != "-":
        with colours():
            print("\n\n".join(pictures(drawings, one_scale=settings.measured is not None)))
        print("".join(f"wrote {path}\n" for path in (settings.png, settings.trace, settings.json) if path), end="")


def pictures(drawings: list[Shown], *, one_scale: bool) -> list[str]:
    """The schedules as text of the terminal's width, with colours if standard output is a terminal."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = shutil.get_terminal_size((120, 24))
    longest = max(drawing.timeline.makespan for drawing in drawings) if one_scale else None
    return [
        timeline_picture(s.timeline, s.title, width=width.columns, colour=colour, longest=longest) for s in drawings
    ]


def simulated(settings: ScheduleFlags) -> list[Shown]:
    """Schedules and plans, each simulated with the given costs."""
    costs = Costs.parse(settings.costs)
    return [Shown(name, simulate(plan, costs), costs) for name, plan in plans(settings)]


def measured(settings: ScheduleFlags) -> list[Shown]:
    """The plan of a step simulated with the measured times, then the measured step."""
    for name in ("compare", "plan"):
        if getattr(settings, name) is not None:
            raise ConfigError(
                f"{name}={getattr(settings, name)!r} excludes measured={settings.measured!r}; remove one of them"
            )
    assert settings.measured is not None
    recorded = read_trace(settings.measured, settings.rank)
    step = recorded.typical if settings.step is None else settings.step
    if step not in recorded.timelines:
        raise ConfigError(f"step={step} was not traced; legal: {', '.join(map(str, recorded.timelines))}")
    ran = recorded.timelines[step]
    costs = measured_costs(ran)
    name = f"{recorded.schedule}, step {step},"
    return [Shown(f"{name} planned (ms)", simulate(ran.plan, costs), costs), Shown(f"{name} measured (ms)", ran, costs)]


def trace(drawings: list[Shown]) -> dict[str, Any]:
    """A Chrome trace of one schedule, or of a plan and the measured step."""
    if len(drawings) == 1:
        return chrome_trace(drawings[0].timeline)
    planned, ran = (drawing.timeline for drawing in drawings)
    both = chrome_trace(planned, label="planned: ")
    both["traceEvents"] += chrome_trace(ran, label="measured: ", first=len(planned.plan.ranks))["traceEvents"]
    return both


def plans(settings: ScheduleFlags) -> list[tuple[str, Plan]]:
    """Name and checked plan of all schedules to draw."""
    names = settings.compare.split(",") if settings.compare else [settings.schedule]
    if settings.plan and not settings.compare:
        names = []
    named = [(name, schedule_plan(name.strip(), settings)) for name in names]
    if settings.plan is not None:
        plan = read_plan(settings.plan)
        has_backward = any(action.kind != "F" for actions in plan.ranks for action in actions)
        named.append((Path(settings.plan).name, check_plan(plan, plan.num_microbatches, forward_only=not has_backward)))
    return named


def schedule_plan(name: str, settings: ScheduleFlags) -> Plan:
    """The checked plan of a schedule, with the default number of chunks if none is given."""
    chunks, table = settings.chunks, schedules()
    if chunks is None or (settings.compare and name in table and table[name].chunks is not None):
        default = 2 if name == "interleaved" else 1
        chunks = default if name not in table else table[name].chunks or default
    paired = settings.paired and not (settings.compare and name in table and name not in schedules(in_pairs=True))
    plan = make_plan(name, settings.pipeline_size, chunks, settings.microbatches, paired=paired)
    return check_plan(plan, settings.microbatches, forward_only=name == "forward_only")


def figures(drawing: Shown) -> dict[str, Any]:
    """The figures of a schedule, for JSON."""
    timeline = drawing.timeline
    plan = drawing.timeline.plan
    return {
        "schedule": drawing.name,
        "pipeline_size": len(plan.ranks),
        "chunks": plan.num_chunks,
        "microbatches": plan.num_microbatches,
        "costs": drawing.costs.text,
        "bubble": timeline.bubble,
        "idle": timeline.idle,
        "makespan": timeline.makespan,
        "longest_span": max(timeline.spans),
        "peak_activations": peak_activations(plan),
        "receive_lookahead": plan.receive_lookahead,
    } | {name: value for name in ("shares", "traffic") if (value := getattr(timeline, name))}


def with_bare_json(arguments: Sequence[str]) -> list[str]:
    """``--json`` without a file is ``--json -``."""
    words: list[str] = []
    for argument, following in zip(arguments, [*arguments, "--"][1:], strict=True):
        words += [argument, "-"] if argument == "--json" and following.startswith("--") else [argument]
    return words


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags, draw and exit."""
    words = with_bare_json(sys.argv[1:] if arguments is None else arguments)
    settings = parse_flags(ScheduleFlags, args=words, description=__doc__)
    return status_of(lambda: show_schedule(settings))
