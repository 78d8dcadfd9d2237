"""Disturb jobs with ``--recover in-process`` by random faults, and compare their ends with undisturbed jobs.

python -m tests.end_to_end.recovery_chaos --faults 300 --out runs/recovery.json

Each job has up to three faults: deaths at named points of a step, raised errors, stopped and hanging processes, and
wrong and lost transfers, and signals from outside at random times. Weights and optimizer state at the end must be
bitwise equal. In every fourth job a rank dies without a spare, and the others continue: equal within 1e-9 in float64.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from megatron_core.resilience.settings import DEATHS, LINK_AXES, LINK_DAMAGES
from tests.checkpoint.runs import SMALL, stored
from tests.end_to_end.recovery_table import Seen, layout_of, table
from tests.end_to_end.test_failures import ranks_without_launcher

STEPS = 20
SECONDS = 120.0
JOB = SMALL | {
    **{"num_layers": 2, "train_iters": STEPS, "eval_iters": 1, "eval_interval": 7, "hidden_dropout": 0.1},
    **{"recover": "in-process", "save_interval": 5, "distributed_timeout_minutes": 0.05},
    **{"link_check_interval": 1, "check_pipeline_messages": True, "global_batch_size": 8, "micro_batch_size": 1},
}
MOE = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True}
CASES: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2 dp2": {},
    "pp2 dp2": {},
    "dp2 zero1": {"overlap_param_gather": True, "overlap_grad_reduce": True},
    "dp2 zero2": {"async_save": True},
    "dp2 zero3": {},
    "cp2": {},
    "tp2": {"distributed_backend": "gloo"},
    "dp2 ep2": MOE,
    "dp4 zero1": {},
    "dp4 zero3": {},
    "dp2, groups": {"outer_steps": 2},
    "dp4 zero1, groups": {"outer_steps": 3, "outer_fragments": 2, "outer_delay": 1},
}
DAMAGED = "wrong data"
"""Kind of all faults in which a transfer delivers wrong data."""
HARMLESS = ("clock",)
"""Faults that need no recovery."""
FROM_OUTSIDE = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
KINDS = (*(kind for kind in DEATHS if kind != "kill-recovery"), "exception", "hang", "stop", *HARMLESS, *FROM_OUTSIDE)
NAMED = {"exception": "raised InjectedError", "stop": "was stopped", "SIGSTOP": "was stopped", "hang": "no progress"}
"""Words of the message by the kind of fault; the others are ``was killed by SIGKILL``."""


@dataclass(frozen=True)
class Planned:
    """A fault of a job."""

    kind: str
    rank: int
    step: int


def training_process(supervisor: int) -> int | None:
    """The training process of a supervisor, if it runs."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()[-1])
    return None


def run_job(folder: Path, case: str, faults: Sequence[Planned], **more: Any) -> str:
    """Run a job with ``faults``; returns its output. ``AssertionError`` if it fails or does not end."""
    size = layout_of(case).world_size
    folder.mkdir()
    logs = [folder / f"log{rank}" for rank in range(size)]
    inside = tuple(f"{each.kind}@{each.rank}:{each.step}" for each in faults if each.kind not in FROM_OUTSIDE)
    settings = JOB | layout_of(case).settings() | CASES[case] | more | {"inject_fault": inside}
    outside = sorted((each for each in faults if each.kind in FROM_OUTSIDE), key=lambda each: each.step)
    with ranks_without_launcher(logs, save=str(folder / "save"), **settings) as ranks:
        deadline = time.monotonic() + SECONDS
        while any(rank.is_alive() for rank in ranks):
            output = "".join(log.read_text() for log in logs if log.exists())
            assert time.monotonic() < deadline, f"{case} {faults} did not end:\n{output}"
            if outside and f"iteration {outside[0].step}/" in output:
                due = outside.pop(0)
                pid = training_process(ranks[due.rank].pid)
                if pid is not None:
                    os.kill(pid, FROM_OUTSIDE[due.kind])
            time.sleep(0.01)
        statuses = [rank.exitcode for rank in ranks]
    output = "".join(log.read_text() for log in logs)
    assert statuses == [0] * size, f"{case} {faults}: {statuses}\n{output}"
    return output


def end_of(folder: Path) -> dict[str, torch.Tensor]:
    """The last checkpoint of a job."""
    return stored(folder / "save" / f"iter_{STEPS:07d}")


def count(output: str, faults: Sequence[Planned], seen: dict[str, Seen]) -> None:
    """Add the recoveries of a job to ``seen``."""
    lines = re.findall(r"recovered in ([\d.]+) s: (.*)", output)
    recoveries, harmful = len(lines), sum(fault.kind not in HARMLESS for fault in faults)
    for fault in faults:
        axis, _, damage = fault.kind.partition("-")
        is_link = axis in LINK_AXES
        if f"{fault.kind} in step {fault.step} has not happened" in output:
            continue  # for example zeros in a tensor of zeros
        words = f"rank {fault.rank} {NAMED.get(fault.kind, 'was killed by SIGKILL')}"
        if fault.kind == "hang" or damage == "lost":
            words = rf"rank {fault.rank} (has made no progress|.*did not join)|.*: rank {fault.rank} .*did not join"
        elif is_link:
            words = rf"wrong data arrived in step {fault.step}: .*ranks? .*\b{fault.rank}\b.* received"
        own = seen.setdefault((DAMAGED if damage in LINK_DAMAGES else damage) if is_link else fault.kind, Seen())
        own.faults += 1
        if fault.kind in HARMLESS:
            own.named += recoveries <= harmful
            continue
        found = next((line for line in lines if re.match(words, line[1])), None)
        if found is not None:
            own.named += 1
            own.seconds.append(float(found[0]))
            lines.remove(found)


def drawn(chance: random.Random, case: str, *, without_spare: bool) -> list[Planned]:
    """Three faults of a job, or one death without a spare."""
    size, steps = layout_of(case).world_size, sorted(chance.sample(range(1, STEPS + 1), 3))
    if without_spare:
        kind = chance.choice(("kill", "kill-copy", "kill-gradients", "kill-update", "SIGKILL"))
        return [Planned(kind, chance.randrange(size), steps[0])]
    links = [f"{axis}-{kind}" for axis in LINK_AXES for kind in (*LINK_DAMAGES, "lost") if axis in case]
    kinds = [chance.choice(links if chance.random() < 0.2 else KINDS) for _ in steps]
    given = [Planned(kind, chance.randrange(size), step) for kind, step in zip(kinds, steps, strict=True)]
    given = [each for each in given if each.kind != "kill-save" or each.step % 5 == 0] or given[:1]
    return [Planned("kill-save", given[0].rank, 5)] if given[0].kind == "kill-save" else given


def differs(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, fewer: bool) -> list[str]:
    """The tensors in which two ends differ; by more than rounding in float64 if ``fewer`` ranks have continued."""
    if fewer:
        return [key for key in expected if not torch.allclose(found[key], expected[key], rtol=1e-9, atol=1e-9)]
    return [key for key in expected if not torch.equal(found[key], expected[key])]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Disturb jobs by random faults, and write the results."""

    faults: int = 300
    """Total number of faults over all layouts."""
    seed: int = 0
    """Seed for layouts, kinds, ranks and steps."""
    out: str = "runs/recovery.json"
    """File to write; the table has the same name with .md."""


def main() -> None:
    """Use all layouts in turn."""
    settings = tyro.cli(Settings, description=__doc__)
    chance, seen, number = random.Random(settings.seed), dict[str, Seen](), 0
    out = Path(settings.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        expected: dict[str, dict[str, torch.Tensor]] = {}
        while sum(one.faults for one in seen.values()) < settings.faults:
            case = list(CASES)[number % len(CASES)]
            if case not in expected:
                run_job(Path(name) / f"alone{number}", case, [])
                expected[case] = end_of(Path(name) / f"alone{number}")
            layout = layout_of(case)
            without_spare = layout.dp > layout.ep and number % 4 == 3 and "groups" not in case
            given = drawn(chance, case, without_spare=without_spare)
            folder = Path(name) / f"job{number}"
            count(run_job(folder, case, given, recover_without_spare=without_spare), given, seen)
            unequal = differs(end_of(folder), expected[case], fewer=without_spare)
            assert not unequal, f"{case} {given}: {unequal} differ from the job that was left alone"
            number += 1
            out.write_text(json.dumps({kind: asdict(one) for kind, one in seen.items()}, indent=1) + "\n")
            out.with_suffix(".md").write_text(table(seen))
            print(f"{sum(one.faults for one in seen.values())} faults survived", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
