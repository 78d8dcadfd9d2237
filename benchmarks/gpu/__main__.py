"""Check everything on one GPU or several: speed, kernels, a training in each mode and layout; one record, two pages.

    make gpu                                # or python -m benchmarks.gpu
    python -m benchmarks.gpu --only train   # the stages whose name begins with a text
    python -m benchmarks.gpu --minutes 9 --continue  # after each other: where commands may not take longer
    python -m benchmarks.gpu --device cpu   # the same program with tiny models, on a machine without a GPU

The speed of two trainings is measured first, and printed and stored as soon as it is known. Each stage is a process
with a time limit; one that fails, hangs or is killed is reported with the line where it was, and the others run. Needs
no network: packages that the machine lacks are installed from wheels in the folder ``wheels``. The exit status is 1 if
a stage failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from threading import Event
from typing import Any, cast

from benchmarks.gpu.figures import headline
from benchmarks.gpu.stages import PACKAGES, PATH, ROOT, TOGETHER, Stage, all_stages

TAIL = 6000
"""Characters of the output of a failed stage in the record."""
STACK_SECONDS = 3.0
"""Time in which a stage at its limit prints its stacks."""


def run_stage(
    stage: Stage,
    folder: Path,
    remaining: float,
    settings: dict[str, str] | None = None,
    stop: Event | None = None,
) -> dict[str, Any]:
    """Run a stage in its own process group, at most ``remaining`` seconds or until ``stop``, and describe what
    happened."""
    limit = min(stage.limit, remaining)
    name = "".join(letter if letter.isalnum() else "_" for letter in stage.name)
    log, figures_file = folder / f"{name}.log", folder / f"{name}.json"
    figures_file.unlink(missing_ok=True)
    command = [*stage.command, *(("--out", str(figures_file)) if stage.has_figures else ())]
    modules = os.pathsep.join(filter(None, (str(ROOT), str(PACKAGES), os.environ.get("PYTHONPATH"))))
    # At the limit every process of the stage prints where it is.
    stacks = {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    environment = {**os.environ, **stacks, **(settings or {}), **stage.environment, "PYTHONPATH": modules, "PATH": PATH}
    began, status = time.monotonic(), None
    culprit = ""
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            # A stack is printed by SIGABRT, which would also store all memory of the process.
            resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, 0))
        except OSError as error:
            return outcome(stage, "failed", reason=f"{command[0]} cannot be started: {error}")
        try:
            while status is None and time.monotonic() < began + limit and not (stop and stop.is_set()):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(max(min(began + limit - time.monotonic(), 0.5), 0.0))
            if status is None:
                culprit = ask_where(process, log)
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
    reason = why(status, limit, figures) + (f", {culprit}" if culprit else "")
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


def ask_where(process: subprocess.Popen[bytes], log: Path) -> str:
    """Let all processes of a stage print their stacks and end; the innermost line of this project, and of torch."""
    length = log.stat().st_size
    deadline = time.monotonic() + STACK_SECONDS
    # One after another: stacks are written in small pieces, and those of two processes would mix in the log.
    for member in group_members(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(member, signal.SIGABRT)
        while is_running(member) and time.monotonic() < deadline:
            time.sleep(0.01)
    process.poll()
    with log.open("rb") as output:
        output.seek(length)
        return culprit_of(output.read().decode(errors="replace"))


def group_members(group: int) -> list[int]:
    """The processes of a group, the oldest first."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    members.append(int(entry.name))
    return sorted(members)


def is_running(process: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def culprit_of(stacks: str) -> str:
    """A phrase for the innermost line of the main thread's stack, and the innermost one of this project."""
    main_threads = re.findall(r"^Current thread .*?(?=^\S|\Z)", stacks, re.DOTALL | re.MULTILINE)
    frames = [re.findall(r'File "(.+)", line (\d+) in (\S+)', thread) for thread in main_threads]
    # The last stack is the one of a rank, where there are ranks; their parent only waits.
    lines = next((stack for stack in reversed(frames) if stack), [])
    if not lines:
        return ""
    ours = next((frame for frame in lines if frame[0].startswith(str(ROOT)) and "/.venv/" not in frame[0]), None)
    shown = [lines[0], *([ours] if ours not in (None, lines[0]) else [])]
    places = (f"{path.removeprefix(f'{ROOT}/')}:{line} in {function}" for path, line, function in shown)
    return f"in {', called at '.join(places)}"


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
    """The record of the check, written after every stage; ``stages`` are those of an earlier run that count."""

    def __init__(self, path: Path, device: str, budget: float, stages: Sequence[dict[str, Any]] = ()) -> None:
        self.path, self.began, self.stages = path, time.monotonic(), list(stages)
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


def run_all(stages: Sequence[Stage], record: Record, budget: float, together: int = 1) -> None:
    """Run the stages one after the other, small ones ``together`` at a time; those for which no time remains are
    recorded as skipped."""
    folder = record.path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // together, 1))} if together > 1 else {}
    known = {stage["name"] for stage in record.stages}
    stop, blocked = Event(), cast(str | None, None)

    def run(stage: Stage) -> dict[str, Any]:
        remaining = budget - record.seconds
        if blocked or stage.obstacle:
            return outcome(stage, "skipped", reason=blocked or stage.obstacle)
        if remaining <= 0:
            return outcome(stage, "skipped", reason=f"{budget / 60:g} minutes were over; give a larger --minutes")
        return run_stage(stage, folder, remaining, threads if stage.is_small else None, stop)

    for is_small, some in groupby((stage for stage in stages if stage.name not in known), lambda each: each.is_small):
        for stage, found in _outcomes(list(some), run, together if is_small else 1, stop):
            told = found["reason"] or headline(found["figures"])
            print(f"{stage.name:32} {found['status']:8} {found['seconds']:7.1f} s  {told}", flush=True)
            if stage.name == "environment" and found["status"] == "failed":
                blocked = "the stage environment failed, see its reason"
            record.stages.append(found)
            record.write()


def _outcomes(
    stages: Sequence[Stage], run: Callable[[Stage], dict[str, Any]], together: int, stop: Event
) -> Iterator[tuple[Stage, dict[str, Any]]]:
    """Yield each stage with its outcome when it has ended; set ``stop`` if the others are to end, too."""
    if together == 1:
        for stage in stages:
            yield stage, run(stage)
        return
    with ThreadPoolExecutor(together) as pool:
        started = {pool.submit(run, stage): stage for stage in stages}
        try:
            for done in as_completed(started):
                yield started[done], done.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def kept_stages(path: Path, stages: Sequence[Stage], device: str) -> list[dict[str, Any]]:
    """The outcomes of an earlier run in the record ``path`` that ``--continue`` does not run again."""
    found = read_figures(path)
    if found is None or found.get("device") != device:
        return []
    wanted = {stage.name for stage in stages if not stage.is_repeated}
    return [each for each in found["stages"] if each["name"] in wanted and each["status"] != "skipped"]


def without_gpu() -> str | None:
    """Why no stage can run on a GPU of this machine; None if torch sees one."""
    # In another process, which may take long or be killed by a broken driver.
    seen = "import torch; print('yes' if torch.cuda.is_available() else f'torch {torch.__version__} sees none')"
    try:
        result = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, timeout=120.0)
    except subprocess.TimeoutExpired:
        return "torch.cuda.is_available() did not return within 120 s"
    answer = (result.stdout.strip() or result.stderr.strip()).splitlines()
    return None if answer[-1:] == ["yes"] else "; ".join(answer[-1:]) or f"python ended with {result.returncode}"


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
    parser.add_argument(
        "--continue", action="store_true", dest="continues", help="keep the outcomes in the record, run what is missing"
    )
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
    if given.device == "cuda" and (reason := without_gpu()) is not None:
        print(f"make gpu needs an NVIDIA GPU and torch with CUDA, and {reason}; --device cpu tests the program itself")
        return 1
    out, together = given.out.resolve(), TOGETHER if given.device == "cuda" else 1
    kept = kept_stages(out, all_stages(given.device), given.device) if given.continues else []
    return check(stages, out, given.device, 60.0 * given.minutes, kept=kept, together=together)


def check(
    stages: Sequence[Stage],
    out: Path,
    device: str,
    budget: float,
    *,
    kept: Sequence[dict[str, Any]] = (),
    together: int = 1,
) -> int:
    """Run ``stages`` without ``kept``, write the record ``out`` and its page with the same name; return the exit
    status."""
    out.parent.mkdir(parents=True, exist_ok=True)
    record, html = Record(out, device, budget, kept), out.with_suffix(".html")
    try:
        run_all(stages, record, budget, together)
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
    pages = f"{html} and {html.with_suffix('.md').name}"
    print(f"{passed} ok, {skipped} skipped, {len(failed)} failed{names}; record {out}, pages {pages}")
    is_whole = {stage.name for stage in stages} <= {stage["name"] for stage in record.stages}
    return 0 if is_whole and page is not None and page["status"] == "ok" and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
