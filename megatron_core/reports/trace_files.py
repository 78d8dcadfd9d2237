"""Write and read measured start and end times of pipeline actions (--trace-pipeline).

The folder has a file for each rank, ``rank00003.jsonl``. Its first line identifies the rank; each further line is a
step:

    {"rank": 3, "pipeline": [1, 3], "schedule": "1f1b", "stage_to_rank": [0, 1], "host": "node0"}
    {"step": 1, "began": 81.25, "actions": [["1F0", 0.012, 0.023, 0.004], ["1B0", 0.023, 0.045, 0.001]],
     "transfers": [["tp all_reduce", 0.013, 0.019, 0.004]]}

All times are in seconds; start and end are after ``began``, the host's monotonic clock when this rank left a barrier of
all ranks at the beginning of the step.
"""

# An action starts when its input has arrived and ends when its result is computed, so that waiting for the input is
# excluded. The last number is the time between both in which the rank only waited for collectives. A forward and a
# backward that ran together are one entry, ``0F1&0B0``. A transfer is a collective, or a copy to or from host memory or
# a file, from its call to the end of its wait; its last number is the time in which the rank only waited for it.
# Messages between stages are not listed.
# Ranks on one host share the clock, so their times are comparable to the microsecond. Ranks on different hosts are
# assumed to leave the barrier at the same moment, which is accurate to the latency of the network.
# Only the first ``MOST_STEPS`` steps are recorded: files stay small, and later steps have no overhead.

import json
import platform
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_core.errors import ConfigError, MegatronError
from megatron_core.features.pipeline_schedules.plan_file import parse_turn
from megatron_core.foreign_json import items, numeric, text, whole, wrong
from megatron_core.output_file import json_lines, make_folder, no_follow, refuse_other_file
from megatron_core.planner.simulate import StageCosts, Timeline, TransferSpan
from megatron_core.schedules.actions import Action, format_turn, plan_of_turns
from megatron_core.schedules.checks import check_plan

MOST_STEPS = 20
_LINES = json_lines("trace of a rank", b'{"rank": ')
_MILLISECONDS = 1000.0


class Recording:
    """Times of one step of one rank, by ``clock`` in seconds; an executor's listener calls ``begin`` and ``end``.

    ``waited`` is the time so far in which the rank only waited for collectives.
    """

    def __init__(self, clock: Callable[[], float], waited: Callable[[], float] = lambda: 0.0) -> None:
        self._clock = clock
        self._waited = waited
        self.began = clock()
        self._begun: list[Action] = []
        self._left = 0
        self._start = self.began
        self._before = 0.0
        self.turns: list[tuple[tuple[Action, ...], float, float, float]] = []
        """(actions that ran together, start, end, time of waiting for collectives) in the order of execution."""
        self.transfers: list[TransferSpan] = []
        """Transfers of the step; their times begin at ``began``."""

    def begin(self, action: Action) -> None:
        """Record the start of ``action``; call it when the input has arrived, for a pair twice."""
        # The later of a pair's starts: both run together.
        self._start = self._clock()
        self._begun = [*self._begun, action]
        self._before = self._waited()
        self._left += 1

    def end(self, action: Action) -> None:
        """Record the end of ``action``; call it when the result is computed."""
        self._left -= 1
        if not self._left:
            self.turns.append((tuple(self._begun), self._start, self._clock(), self._waited() - self._before))
            self._begun = []


class TraceWriter:
    """One rank's file, overwritten by every run."""

    def __init__(
        self, folder: str | Path, rank: int, pipeline: Sequence[int], schedule: str, stage_to_rank: Sequence[int]
    ):
        """``pipeline`` lists the global ranks of this rank's pipeline, in the order of the plan's ranks."""
        self._path = _path(folder, rank)
        self._left = MOST_STEPS
        header = {"rank": rank, "pipeline": list(pipeline), "schedule": schedule, "stage_to_rank": list(stage_to_rank)}
        try:
            make_folder(self._path.parent)
            refuse_other_file(f"trace_pipeline={str(folder)!r}", self._path, _LINES)
            self._write("w", header | {"host": platform.node()})
        except OSError as error:
            raise ConfigError(
                f"trace_pipeline={str(folder)!r} cannot be written: {error}; choose another folder"
            ) from None

    @property
    def is_full(self) -> bool:
        """Whether ``MOST_STEPS`` steps have been written."""
        return self._left == 0

    def write(self, step: int, recording: Recording) -> None:
        """Append a step."""
        began = recording.began
        actions = [
            [format_turn(turn), round(start - began, 6), round(end - began, 6), round(waited, 6)]
            for turn, start, end, waited in recording.turns
        ]
        transfers = [
            [transfer.name, round(transfer.start, 6), round(transfer.end, 6), round(transfer.waited, 6)]
            for transfer in sorted(recording.transfers, key=lambda transfer: transfer.start)
        ]
        self._write("a", {"step": step, "began": round(began, 6), "actions": actions, "transfers": transfers})
        self._left -= 1

    def _write(self, mode: str, entry: dict[str, Any]) -> None:
        with open(self._path, mode, encoding="utf-8", opener=no_follow) as file:
            file.write(json.dumps(entry) + "\n")


def _is_named(value: Any) -> bool:
    """Whether ``value`` is a list of the name of a turn or transfer, start, end and time of waiting."""
    return isinstance(value, list) and len(value) == 4 and text(value[0]) and all(map(numeric(-1e12, 1e12), value[1:]))


_HEADER = {
    "rank": whole(), "pipeline": items(whole(0, 2**20)), "schedule": text, "stage_to_rank": items(whole(0, 2**20)),
    "host": text,
}  # fmt: skip
_ENTRY = {"step": whole(), "began": numeric(-1e12, 1e12), "actions": items(_is_named)}
_TRANSFERS = {"transfers": lambda value: value == [] or items(_is_named)(value)}


@dataclass(frozen=True)
class Measured:
    """The measured steps of one pipeline."""

    schedule: str
    """Name of the schedule, or of the file with the plan."""
    timelines: dict[int, Timeline]
    """Timeline of each step; times are in milliseconds from the beginning of the step."""

    @property
    def typical(self) -> int:
        """The step with the median makespan."""
        return sorted(self.timelines, key=lambda step: self.timelines[step].makespan)[len(self.timelines) // 2]


def read_trace(folder: str | Path, rank: int = 0) -> Measured:
    """Return the measured steps of the pipeline of global rank ``rank``. ``ConfigError`` for unreadable files."""
    header, _ = _read(folder, rank)
    files = [_read(folder, member) for member in header["pipeline"]]
    for member, (other, _) in zip(header["pipeline"], files, strict=True):
        # Files of an earlier run with other ranks may lie in the same folder.
        if other | {"rank": rank, "host": header["host"]} != header:
            paths = f"{_path(folder, member)} is of another run than {_path(folder, rank)}"
            raise ConfigError(f"{paths}; trace again into an empty folder")
    one_host = len({other["host"] for other, _ in files}) == 1
    # A run that was ended has steps that some ranks did not finish.
    common = sorted(set.intersection(*(set(steps) for _, steps in files)))
    if not common:
        raise ConfigError(f"{folder} has no step that all ranks finished; trace at least one step")
    stage_to_rank = tuple(header["stage_to_rank"])
    try:
        timelines = {step: _timeline([steps[step] for _, steps in files], stage_to_rank, one_host) for step in common}
    except MegatronError:  # the recorded actions are not a complete plan
        raise
    except (ValueError, LookupError) as error:
        raise ConfigError(f"{folder} is not a pipeline trace: {error}; trace again into an empty folder") from error
    return Measured(header["schedule"], timelines)


def measured_costs(timeline: Timeline) -> StageCosts:
    """Return the mean time of a step's actions by stage and kind, and the median time of the messages waited for."""
    times: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    pairs: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for turn in (turn for turns in timeline.plan.turns for turn in turns):
        time = timeline.end[turn[0]] - timeline.start[turn[0]]
        if len(turn) > 1:
            pairs[turn[0].stage, turn[1].stage].append(time)
        else:
            times[turn[0].stage, turn[0].kind].append(time)
    # The median, because a message that waited for a late rank measures that rank.
    message = median(_messages(timeline) or [0.0])
    together = {key: fmean(samples) for key, samples in pairs.items()}
    return StageCosts({key: fmean(samples) for key, samples in times.items()}, message, together)


def _messages(timeline: Timeline) -> list[float]:
    """Return the times of messages, from the end of the sender's action to the start of the receiver's.

    Only messages for which the receiver waited are measured: its previous action had ended before the sender's did.
    """
    plan = timeline.plan
    waits = []
    for turns in plan.turns:
        for (before, *_), turn in pairwise(turns):
            sources = [plan.source(action) for action in turn if plan.sender(action) is not None]
            latest = max((timeline.end[source] for source in sources if source is not None), default=None)
            # Otherwise the message had arrived earlier, and the gap would measure the computation before.
            if latest is not None and timeline.end[before] <= latest:
                waits.append(max(timeline.start[turn[0]] - latest, 0.0))
    return waits


def _path(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank{rank:05d}.jsonl"


def _read(folder: str | Path, rank: int) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """Return a file's header, and its steps by number."""
    path = _path(folder, rank)
    try:
        header, *steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for number, (record, fields) in enumerate([(header, _HEADER), *((entry, _ENTRY) for entry in steps)], 1):
            if not isinstance(record, dict) or (names := wrong(record, fields, _TRANSFERS)):
                what = ", ".join(names) if isinstance(record, dict) else "an object"
                raise ValueError(f"line {number} has no valid value of {what}")
        return header, {entry["step"]: entry for entry in steps}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a pipeline trace: {error}; write one with --trace-pipeline {folder}"
        ) from error


def _timeline(entries: list[dict[str, Any]], stage_to_rank: tuple[int, ...], one_host: bool) -> Timeline:
    """Return the timeline of one step from its entries in all ranks' files; its recorded plan must be complete."""
    first = min(entry["began"] for entry in entries)
    ranks = []
    start = {}
    end = {}
    waited = {}
    transfers = []
    for entry in entries:
        # Clocks of different hosts have different origins.
        later = entry["began"] - first if one_host else 0.0
        turns = [parse_turn(name) for name, *_ in entry["actions"]]
        for turn, (_, begin, stop, wait) in zip(turns, entry["actions"], strict=True):
            for action in turn:
                start[action] = (begin + later) * _MILLISECONDS
                end[action] = (stop + later) * _MILLISECONDS
            waited[turn[0]] = wait * _MILLISECONDS
        ranks.append(turns)
        flights = entry.get("transfers", [])
        transfers.append(
            tuple(
                TransferSpan(
                    name, (begin + later) * _MILLISECONDS, (stop + later) * _MILLISECONDS, wait * _MILLISECONDS
                )
                for name, begin, stop, wait in flights
            )
        )
    # The plan is that which ran, and not one made again from the name of a schedule.
    plan = plan_of_turns(ranks, stage_to_rank)
    return Timeline(check_plan(plan, plan.num_microbatches), start, end, waited, tuple(transfers))
