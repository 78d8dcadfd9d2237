"""Check everything on one GPU: kernels, a training in each mode, speed; one record and one page.

    make gpu                                # or python -m benchmarks.gpu
    python -m benchmarks.gpu --only train   # the stages whose name begins with a text
    python -m benchmarks.gpu --device cpu   # the same program with tiny models, on a machine without a GPU

Each stage is a process with a time limit; one that fails, hangs or is killed is reported, and the others run. Needs
no network. The exit status is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.stages import ROOT, Stage, all_stages

TAIL = 6000
"""Characters of the output of a failed stage in the record."""


def run_stage(stage: Stage, folder: Path, remaining: float) -> dict[str, Any]:
    """Run a stage in its own process group, at most ``remaining`` seconds, and describe what happened."""
    limit = min(stage.limit, remaining)
    name = "".join(letter if letter.isalnum() else "_" for letter in stage.name)
    log, figures_file = folder / f"{name}.log", folder / f"{name}.json"
    figures_file.unlink(missing_ok=True)
    command = [*stage.command, *(("--out", str(figures_file)) if stage.has_figures else ())]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began, status = time.monotonic(), None
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **stage.environment, "PYTHONPATH": path}, stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return outcome(stage, "failed", reason=f"{command[0]} cannot be started: {error}")
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            kill_group(process)
    seconds = time.monotonic() - began
    figures = read_figures(figures_file) if stage.has_figures else {}
    shown = str(log.relative_to(ROOT)) if log.is_relative_to(ROOT) else str(log)
    if status == 0 and figures is not None and "skipped" in figures:
        return outcome(stage, "skipped", seconds, reason=str(figures["skipped"]), log=shown)
    if status == 0 and figures is not None:
        return outcome(stage, "ok", seconds, figures=figures, log=shown)
    if status is None and limit < stage.limit:
        return outcome(stage, "skipped", seconds, reason="the time budget ended; give a larger --minutes", log=shown)
    reason = why(status, limit, figures)
    output_tail = log.read_bytes()[-TAIL:].decode(errors="replace")
    return outcome(stage, "failed", seconds, reason=reason, figures=figures or {}, output=output_tail, log=shown)


def outcome(
    stage: Stage,
    status: str,
    seconds: float = 0.0,
    *,
    reason: str | None = None,
    figures: dict[str, Any] | None = None,
    output: str | None = None,
    log: str | None = None,
) -> dict[str, Any]:
    """The record of a stage."""
    return {
        "name": stage.name, "status": status, "seconds": round(seconds, 2), "limit_seconds": stage.limit,
        "command": list(stage.command), "reason": reason, "figures": figures or {}, "output": output, "log": log,
    }  # fmt: skip


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a stage and the processes that it started and left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_figures(path: Path) -> dict[str, Any] | None:
    """The figures that a stage wrote; None if there are none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def why(status: int | None, limit: float, figures: dict[str, Any] | None) -> str:
    """The reason of a failure in a few words."""
    if status is None:
        return f"did not end within {limit:.0f} s and was killed"
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if figures is not None and figures.get("missing"):
        return "; ".join(map(str, figures["missing"]))
    if figures is not None and "largest_difference" in figures:
        return f"losses differ by {figures['largest_difference']}, bound {figures['bound']}, or do not fall"
    return f"exit status {status}" if status else "wrote no figures"


class Record:
    """The record of the check, written after every stage."""

    def __init__(self, path: Path, device: str, budget: float) -> None:
        self.path, self.began, self.stages = path, time.monotonic(), list[dict[str, Any]]()
        started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self._head = {"version": 1, "device": device, "started": started, "budget_seconds": budget}

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def write(self, *, finished: bool = False) -> None:
        """Replace the file, so that it is whole at every moment."""
        seconds = round(self.seconds, 2)
        content = {**self._head, "finished": finished, "seconds": seconds, "stages": self.stages}
        replacement = self.path.with_suffix(".new")
        replacement.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        replacement.replace(self.path)


def run_all(stages: Sequence[Stage], record: Record, budget: float) -> None:
    """Run the stages one after the other; those for which no time remains are recorded as skipped."""
    folder = record.path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    blocked: str | None = None
    for stage in stages:
        remaining = budget - record.seconds
        if blocked or stage.obstacle:
            found = outcome(stage, "skipped", reason=blocked or stage.obstacle)
        elif remaining <= 0:
            found = outcome(stage, "skipped", reason=f"{budget / 60:g} minutes were over; give a larger --minutes")
        else:
            print(f"{stage.name:32} ...", end="", flush=True)
            found = run_stage(stage, folder, remaining)
            print("\r", end="")
        print(f"{stage.name:32} {found['status']:8} {found['seconds']:7.1f} s  {found['reason'] or ''}", flush=True)
        if stage.name == "environment" and found["status"] == "failed":
            blocked = "the stage environment failed, see its reason"
        record.stages.append(found)
        record.write()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, and say what failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models, to test this")
    parser.add_argument("--minutes", type=float, default=25.0, help="time budget; later stages are left out (25)")
    parser.add_argument("--only", nargs="+", metavar="STAGE", help="stages whose names begin with one of these texts")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "runs" / "gpu.json", help="record; the page has the same name"
    )
    parser.add_argument("--list", action="store_true", help="print the stages and end")
    given = parser.parse_args(arguments)
    stages = all_stages(given.device)
    if given.only is not None:
        unknown = [text for text in given.only if not any(stage.name.startswith(text) for stage in stages)]
        if unknown:
            parser.error(f"--only {unknown[0]!r} names no stage; legal: {', '.join(stage.name for stage in stages)}")
        stages = [stage for stage in stages if stage.name.startswith(tuple(given.only))]
    if given.list:
        print("\n".join(stage.name for stage in stages))
        return 0
    return check(stages, given.out.resolve(), given.device, 60.0 * given.minutes)


def check(stages: Sequence[Stage], out: Path, device: str, budget: float) -> int:
    """Run ``stages``, write the record ``out`` and its page with the same name; return the exit status."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record, html = Record(out, device, budget), out.with_suffix(".html")
    try:
        run_all(stages, record, budget)
        record.write(finished=True)
    except KeyboardInterrupt:
        print("\ninterrupted; the stages so far are recorded")
    finally:
        paged = Stage("page", (sys.executable, "-m", "benchmarks.gpu.report", str(out), str(html)), 60.0)
        page = run_stage(paged, out.with_suffix(""), 60.0) if record.stages else None
    if page is not None and page["status"] != "ok":
        print(f"page       {page['status']}: {page['reason']}; see {page['log']}")
    failed = [stage for stage in record.stages if stage["status"] == "failed"]
    skipped = sum(stage["status"] == "skipped" for stage in record.stages)
    passed = len(record.stages) - len(failed) - skipped
    names = f" ({', '.join(stage['name'] for stage in failed)}; output in {out.with_suffix('')})" if failed else ""
    print(f"{passed} ok, {skipped} skipped, {len(failed)} failed{names}; record {out}, page {html}")
    is_whole = len(record.stages) == len(stages) and page is not None and page["status"] == "ok"
    return 0 if is_whole and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
