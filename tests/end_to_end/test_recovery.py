"""Jobs with ``--recover in-process`` whose ranks die, hang and raise, with real processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_core.config.layout import Layout
from megatron_core.config.validate import problems
from tests.checkpoint.runs import SMALL, stored
from tests.end_to_end.test_failures import ranks_without_launcher
from tests.memory import needs_proc
from tests.runs import tiny_config

pytestmark = needs_proc
STEPS = 6
JOB = SMALL | {"num_layers": 2, "train_iters": STEPS, "eval_iters": 0, "hidden_dropout": 0.1}
SECONDS = 90.0


def run(folder: Path, layout: str, **settings: Any) -> tuple[dict[str, torch.Tensor], str]:
    """The last checkpoint of a job that must succeed, and the output of its ranks."""
    size = Layout.parse(layout).world_size
    folder.mkdir()
    logs = [folder / f"log{rank}" for rank in range(size)]
    given = JOB | {"recover": "in-process"} | Layout.parse(layout).settings() | settings
    with ranks_without_launcher(logs, save=str(folder / "save"), **given) as ranks:
        for rank in ranks:
            rank.join(SECONDS)
        statuses = [rank.exitcode for rank in ranks]
    output = "".join(log.read_text() for log in logs)
    assert statuses == [0] * size, output
    return stored(folder / "save" / f"iter_{STEPS:07d}"), output


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights and optimizer state have equal bits."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize(
    ("layout", "faults"),
    [
        ("dp2", ["kill@1:3", "kill-update@0:5"]),
        ("tp2 dp2", ["kill-gradients@2:2"]),
        ("pp2 dp2", ["kill-update@3:4"]),
        ("dp2 zero3", ["kill-copy@0:2", "kill-save@1:4"]),
    ],
)
def test_the_end_is_that_of_an_undisturbed_run(layout: str, faults: list[str], tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "undisturbed", layout)
    found, output = run(tmp_path / "disturbed", layout, inject_fault=tuple(faults), save_interval=1)
    assert_same(found, expected)
    recoveries = re.findall(r"recovered in ([\d.]+) s: (rank \d was killed by SIGKILL)", output)
    assert len(recoveries) == len(faults) and all(float(seconds) < 5 for seconds, _ in recoveries)


@pytest.mark.parametrize(("layout", "lost", "left"), [("dp2", 0, 1), ("tp2 dp2", 3, 2)])
def test_fewer_replicas_continue_without_a_spare(layout: str, lost: int, left: int, tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "undisturbed", layout)
    found, output = run(
        tmp_path / "disturbed", layout, inject_fault=(f"kill-gradients@{lost}:3",), recover_without_spare=True
    )
    assert f"rank {lost} was killed by SIGKILL; {left} of {Layout.parse(layout).world_size} ranks continue" in output
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("exception@1:3", r"rank 1 raised InjectedError: an injected fault: exception; no process died"),
        ("stop@0:3", r"rank 0 was stopped for 1 s and killed; a new process takes the place of rank 0"),
        pytest.param("hang@1:3", "rank 1 has made no progress for . s", marks=pytest.mark.whole_matrix),
    ],
)
@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.whole_matrix)])
def test_errors_and_hangs_are_survived_and_named(fault: str, words: str, backend: str, tmp_path: Path) -> None:
    settings = {"distributed_backend": backend, "distributed_timeout_minutes": 0.1}
    expected, _ = run(tmp_path / "undisturbed", "tp2", **settings)
    found, output = run(tmp_path / "disturbed", "tp2", inject_fault=(fault,), **settings)
    assert_same(found, expected)
    assert re.search(rf"recovered in [\d.]+ s: {words}", output), output


def test_a_death_in_a_recovery_is_survived(tmp_path: Path) -> None:
    expected, _ = run(tmp_path / "undisturbed", "dp2")
    found, output = run(tmp_path / "disturbed", "dp2", inject_fault=("kill@1:3", "kill-recovery@0:3"))
    assert_same(found, expected)
    assert "injected fault: kill-recovery before step 3" in output
    assert "rank 1 was killed by SIGKILL; then rank 0 was killed by SIGKILL; " in output


def test_a_fault_that_repeats_ends_the_job(tmp_path: Path) -> None:
    logs = [tmp_path / "0", tmp_path / "1"]
    settings = {"train_iters": 4, "recover": "in-process", "inject_fault": ("kill@1:3:always",)}
    with ranks_without_launcher(logs, **settings) as ranks:
        for rank in ranks:
            rank.join(SECONDS)
        statuses = [rank.exitcode for rank in ranks]
    assert None not in statuses and 0 not in statuses
    assert "6 times in one iteration" in "".join(log.read_text() for log in logs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"elastic": True, "save": "a", "load": "a"}, "elastic=True exclude one another"),
        ({"grad_compression": "zero-one-adam"}, "zero-one-adam, whose ranks differ"),
        ({"inject_fault": ("kill@0:1",) * 63}, "give at most 62"),
        ({"recover_without_spare": True, "zero_stage": 2}, "zero_stage=2, whose shards have no copy"),
        ({"recover_without_spare": True, "global_batch_size": None}, "needs global_batch_size"),
        ({"recover_without_spare": True, "grad_compression": "powersgd"}, "grad_compression=powersgd, whose errors"),
    ],
)
def test_settings_that_exclude_a_recovery(settings: dict[str, Any], words: str) -> None:
    found = list(problems(tiny_config(recover="in-process", **settings), 2))
    assert any(words in text for text in found), found
