"""Jobs with ``--recover in-process`` whose ranks die, hang and raise, with real processes."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from megatron_core.config.validate import problems
from megatron_core.planner.layout import Layout
from megatron_core.resilience.processes import supervisor
from tests.checkpoint.runs import SMALL, edit, stored
from tests.end_to_end.recovery_chaos import training_process
from tests.end_to_end.test_failures import ranks_without_launcher
from tests.memory import needs_proc
from tests.programs import free_port
from tests.runs import tiny_config

pytestmark = needs_proc
STEPS = 6
JOB = SMALL | {"num_layers": 2, "train_iters": STEPS, "eval_iters": 0, "hidden_dropout": 0.1}
SECONDS = 90.0
MOE = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True}


def run(folder: Path, layout: str, steps: int = STEPS, **settings: Any) -> tuple[dict[str, torch.Tensor], str]:
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
    return stored(folder / "save" / f"iter_{steps:07d}"), output


@cache
def _undisturbed(layout: str, steps: int, settings: tuple[tuple[str, Any], ...]) -> dict[str, torch.Tensor]:
    with TemporaryDirectory() as folder:
        return run(Path(folder) / "run", layout, steps, **dict(settings))[0]


def undisturbed(layout: str, steps: int = STEPS, **settings: Any) -> dict[str, torch.Tensor]:
    """The last checkpoint of a job without faults, which is trained once for all tests that compare with it."""
    return _undisturbed(layout, steps, tuple(settings.items()))


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Weights and optimizer state have equal bits."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def await_text(log: Path, text: str) -> None:
    """Wait until ``log`` contains ``text``."""
    deadline = time.monotonic() + SECONDS
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline, f"{text} is not in\n{log.read_text()}"
        time.sleep(0.02)


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
    expected = undisturbed(layout)
    found, output = run(tmp_path / "disturbed", layout, inject_fault=tuple(faults), save_interval=1)
    assert_same(found, expected)
    recoveries = re.findall(r"recovered in ([\d.]+) s: (rank \d was killed by SIGKILL)", output)
    assert len(recoveries) == len(faults) and all(float(seconds) < 5 for seconds, _ in recoveries)


def test_the_line_names_every_process_that_was_killed(tmp_path: Path) -> None:
    _, output = run(tmp_path / "run", "dp2", inject_fault=("kill@0:3", "kill@1:3"))
    (line,) = [line for line in output.splitlines() if "recovered in" in line]
    assert line.count("was killed by SIGKILL") == 2
    assert "new processes take the place of ranks 0, 1" in line


@pytest.mark.parametrize(
    ("layout", "lost", "left"),
    [
        ("dp2", 0, 1),
        ("tp2 dp2 zero1", 3, 2),
        ("dp4 zero2", 1, 2),
        ("dp2 zero3", 1, 1),
        pytest.param("dp4 ep2", 2, 2, marks=pytest.mark.whole_matrix),
        pytest.param("pp2 dp2 zero1", 0, 2, marks=pytest.mark.whole_matrix),
    ],
)
def test_fewer_replicas_continue_without_a_spare(layout: str, lost: int, left: int, tmp_path: Path) -> None:
    model = {"global_batch_size": 8} | (MOE if "ep" in layout else {})
    expected = undisturbed(layout, **model)
    fault = {"inject_fault": (f"kill-gradients@{lost}:3",), "recover_without_spare": True}
    found, output = run(tmp_path / "disturbed", layout, **fault, **model)
    assert f"rank {lost} was killed by SIGKILL; {left} of {Layout.parse(layout).world_size} ranks continue" in output
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


GROUPS = {"outer_steps": 2, "outer_lr": 0.9, "global_batch_size": 12}
STREAMS = GROUPS | {"outer_fragments": 2, "outer_delay": 1, "outer_alpha": 0.25}


@pytest.mark.parametrize(
    ("layout", "groups", "faults"),
    [
        ("dp2", GROUPS, ["kill-update@1:4"]),
        pytest.param("tp2 dp2 zero1", STREAMS, ["kill@0:4", "kill-copy@3:6"], marks=pytest.mark.whole_matrix),
    ],
)
def test_groups_end_as_an_undisturbed_run(
    layout: str, groups: dict[str, Any], faults: list[str], tmp_path: Path
) -> None:
    expected = undisturbed(layout, **groups)
    found, output = run(tmp_path / "disturbed", layout, inject_fault=tuple(faults), save_interval=3, **groups)
    assert_same(found, expected)
    assert output.count("was killed by SIGKILL; a new process takes the place") == len(faults)


def without_group(folder: Path, lost: int, left: int) -> None:
    """Change a checkpoint into one of the groups other than ``lost``."""

    def change(content: dict[str, Any]) -> None:
        content["state"]["config"]["outer_groups"] = left
        tensors, content["tensors"] = content["tensors"], {}
        for name, tensor in tensors.items():
            first, _, rest = name.partition(".")
            number = int(first.removeprefix("group")) if first.startswith("group") else -1
            if number != lost:
                content["tensors"][f"group{number - 1}.{rest}" if number > lost else name] = tensor

    edit(folder, change)


@pytest.mark.parametrize(
    ("layout", "lost", "left"), [("dp2", 0, 1), pytest.param("dp3", 1, 2, marks=pytest.mark.whole_matrix)]
)
def test_other_groups_continue_without_a_lost_one(layout: str, lost: int, left: int, tmp_path: Path) -> None:
    """As a run of these groups from the same state: the mean is over them, and they train on all samples."""
    size = left + 1
    settings = GROUPS | {"outer_groups": size}
    run(tmp_path / "undisturbed", layout, save_interval=3, **settings)
    fault = {"inject_fault": (f"kill-gradients@{lost}:4",), "recover_without_spare": True}
    found, output = run(tmp_path / "disturbed", layout, **fault, **settings)
    assert (
        f"rank {lost} was killed by SIGKILL; {left} of {size} ranks continue without group {lost} of {size}" in output
    )
    state = tmp_path / "undisturbed" / "save" / "iter_0000003"
    without_group(state, lost, left)
    expected, _ = run(tmp_path / "alone", f"dp{left}", load=str(state), **settings | {"outer_groups": left})
    assert_same(found, expected)


def test_fewer_replicas_have_equal_bits_with_layout_invariance(tmp_path: Path) -> None:
    model = {"fp64": False, "layout_invariant": True}
    expected = undisturbed("dp2 zero1", **model)
    fault = {"inject_fault": ("kill-update@1:3",), "recover_without_spare": True}
    found, output = run(tmp_path / "disturbed", "dp2 zero1", **fault, **model)
    assert "1 of 2 ranks continue" in output
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("layout", "whole_host", "steps"),
    [("dp2 zero1", False, 60), pytest.param("tp2 dp2 zero3", True, 150, marks=pytest.mark.whole_matrix)],
)
def test_a_lost_rank_joins_again(
    layout: str, whole_host: bool, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training process, or with its supervisor and memory, is killed; another process takes its place later."""
    monkeypatch.setattr(supervisor, "LOST", 3.0)
    size, save, port = Layout.parse(layout).world_size, str(tmp_path / "save"), free_port()
    settings = JOB | Layout.parse(layout).settings() | {"recover": "in-process", "recover_without_spare": True}
    settings |= {"train_iters": steps, "recover_mirror": whole_host, "save": save, "port": port}
    expected = undisturbed(layout, steps, train_iters=steps)
    logs = [tmp_path / f"log{rank}" for rank in range(size)]
    with ranks_without_launcher(logs, **settings) as ranks:
        await_text(logs[0], "iteration 5/")
        os.kill(ranks[-1].pid if whole_host else training_process(ranks[-1].pid) or 0, signal.SIGKILL)
        await_text(logs[0], f"{size // 2} of {size} ranks continue")
        again = [*logs[:-1], tmp_path / "again"]
        with ranks_without_launcher(again, first=size - 1, recover_join=True, **settings) as (late,):
            await_text(logs[0], f"rank {size - 1} joins: {size} of {size} ranks continue after iteration")
            for rank in (*ranks[:-1], late):
                rank.join(SECONDS)
                assert rank.exitcode == 0, "".join(log.read_text() for log in (*logs, again[-1]))
    found = stored(tmp_path / "save" / f"iter_{steps:07d}")
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
    expected = undisturbed("tp2", **settings)
    found, output = run(tmp_path / "disturbed", "tp2", inject_fault=(fault,), **settings)
    assert_same(found, expected)
    assert re.search(rf"recovered in [\d.]+ s: {words}", output), output


@pytest.mark.parametrize(
    ("layout", "fault", "words"),
    [
        (
            "dp2 zero1",
            "dp-flipped@1:3",
            "wrong data arrived in step 3: rank 1 received wrong values .*; no process died",
        ),
        ("tp2", "tp-lost@1:3", "rank . .*; no process died"),
    ],
)
def test_wrong_and_lost_transfers_are_survived_and_named(layout: str, fault: str, words: str, tmp_path: Path) -> None:
    settings = {"link_check_interval": 1, "distributed_timeout_minutes": 0.05}
    expected = undisturbed(layout, **settings)
    found, output = run(tmp_path / "disturbed", layout, inject_fault=(fault,), **settings)
    assert_same(found, expected)
    assert re.search(rf"recovered in [\d.]+ s: {words}", output), output


def test_a_delayed_transfer_changes_nothing(tmp_path: Path) -> None:
    expected = undisturbed("dp2")
    began = time.monotonic()
    found, output = run(tmp_path / "disturbed", "dp2", inject_fault=("dp-delayed@1:3",))
    assert_same(found, expected)
    assert time.monotonic() - began > 2.0 and "recovered" not in output and "has not happened" not in output


def test_a_rank_that_computes_wrong_numbers_is_named_and_excluded(tmp_path: Path) -> None:
    settings = {"global_batch_size": 8, "micro_batch_size": 1, "replay_interval": 2}
    expected, calm = run(tmp_path / "undisturbed", "dp4 zero1", **settings)
    fault = {"inject_fault": ("wrong-numbers@2:4",), "recover_without_spare": True}
    found, output = run(tmp_path / "disturbed", "dp4 zero1", **fault, **settings)
    assert "wrong values" not in calm
    assert re.search(r"rank 2 computed wrong values in step 4: other ranks have other losses", output)
    assert "2 of 4 ranks continue; training continues after iteration 3" in output
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_a_death_in_a_recovery_is_survived(tmp_path: Path) -> None:
    expected = undisturbed("dp2")
    found, output = run(tmp_path / "disturbed", "dp2", inject_fault=("kill@1:3", "kill-recovery@0:3"))
    assert_same(found, expected)
    assert "injected fault: kill-recovery before step 3" in output
    assert "rank 1 was killed by SIGKILL; then rank 0 was killed by SIGKILL" in output


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
        ({"recover_without_spare": True, "global_batch_size": None}, "needs global_batch_size"),
        ({"recover_without_spare": True, "grad_compression": "powersgd"}, "grad_compression=powersgd, whose errors"),
    ],
)
def test_settings_that_exclude_a_recovery(settings: dict[str, Any], words: str) -> None:
    found = list(problems(tiny_config(recover="in-process", **settings), 2))
    assert any(words in text for text in found), found
