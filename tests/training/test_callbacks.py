"""Callbacks of users: their order, their view of a run, requests to stop, and errors."""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_core.checkpoint import find_checkpoint
from megatron_core.errors import MegatronError
from megatron_core.monitor.events import StepEvent
from megatron_core.parallel import World
from megatron_core.reports.memory_report import MemorySnapshots
from megatron_core.resilience.bad_steps import BadSteps
from megatron_core.resilience.failure_log import FailureLog
from megatron_core.training import Callback, pretrain
from megatron_core.training.built_in_callbacks import Reports
from megatron_core.training.callbacks import Callbacks, feature_callbacks
from megatron_core.training.loop import built_in_callbacks, train
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted
from tests.runs import tiny_config, tiny_run

SMALL = {"num_layers": 1, "hidden_size": 16, "seq_length": 8, "vocab_size": 29, "eval_iters": 0}
METHODS = [name for name, _ in inspect.getmembers(Callback, inspect.isfunction) if name != "__init__"]


class Recorder(Callback):
    """Records the calls of all methods in a common list, as (label, method, iteration)."""

    def __init__(self, calls: list[tuple[str, str, int]], label: str = "", priority: int = 0) -> None:
        self.calls, self.label, self.priority = calls, label, priority
        for name in METHODS:
            setattr(self, name, partial(self._record, name, getattr(self, name)))

    def _record(self, name: str, method: Callable[..., object], *arguments: object) -> object:
        self.calls.append((self.label, name, self.run.state.iteration))
        return method(*arguments)


class Sink:
    """Keeps the iterations and losses of step events."""

    setting = "test"

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_step(self, event: StepEvent) -> None:
        self.losses[event.iteration] = event.loss

    def on_validation(self, event: object) -> None: ...

    def close(self) -> None: ...


def test_methods_are_called_in_the_documented_order(tmp_path: Path) -> None:
    calls: list[tuple[str, str, int]] = []
    settings = SMALL | {"eval_iters": 1, "eval_interval": 2, "save_interval": 2, "save": str(tmp_path)}
    train(tiny_run(**settings, train_iters=3), [], [Recorder(calls)])
    before = ("before_step", "around_plan", "before_update", "is_bad")
    assert [(method, iteration) for _, method, iteration in calls] == [
        ("before_run", 0),
        *((method, 0) for method in before),
        ("after_step", 1),
        ("stored_values", 1),
        *((method, 1) for method in before),
        ("after_step", 2),
        ("after_evaluation", 2),
        ("stored_values", 2),
        ("before_save", 2),
        ("after_save", 2),
        *((method, 2) for method in before),
        ("after_step", 3),
        ("stored_values", 3),
        *[("after_evaluation", 3)] * 2,
        ("stored_values", 3),
        ("before_save", 3),
        ("after_save", 3),
        ("after_run", 3),
        ("close", 3),
    ]
    names = inspect.getdoc(Callback)
    positions = [names.index(method) for _, method, _ in calls if method != "on_failure"]
    assert positions[:5] == sorted(positions[:5]) and all(method in names for method in METHODS)


def test_evaluation_starts_at_an_iteration() -> None:
    calls: list[tuple[str, str, int]] = []
    settings = SMALL | {"eval_iters": 1, "eval_interval": 1, "start_eval_at_iter": 3}
    train(tiny_run(**settings, train_iters=4), [], [Recorder(calls)])
    assert [iteration for _, method, iteration in calls if method == "after_evaluation"] == [3, 4, 4]


def _check_priorities() -> None:
    """Higher priorities first, equal ones in the order of adding, also between users' and built-in callbacks."""
    calls: list[tuple[str, str, int]] = []
    sink, seen = Sink(), {}

    class Counter(Callback):
        def __init__(self, priority: int) -> None:
            self.priority = priority

        def after_step(self, result: StepResult) -> None:
            seen.setdefault(self.priority, []).append(len(sink.losses))

    around = [Counter(Reports.priority - 1), Counter(Reports.priority + 1)]
    own = [Recorder(calls, "low", -7), Recorder(calls, "a"), Recorder(calls, "high", 7), Recorder(calls, "b")]
    train(tiny_run(**SMALL, train_iters=2), [sink], [*around, *own])
    assert seen == {Reports.priority + 1: [0, 1], Reports.priority - 1: [1, 2]}
    for method in ("before_run", "before_step", "before_update", "is_bad", "after_step", "after_run"):
        labels = [label for label, name, _ in calls if name == method]
        assert labels[:4] == ["high", "a", "b", "low"], method
    assert [label for label, name, _ in calls if name == "close"] == ["low", "b", "a", "high"]


def test_priorities() -> None:
    _check_priorities()


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("Callbacks.__init__", "-_checked(callback).priority", "_checked(callback).priority"),
        ("Callbacks.__init__", "-_checked(callback).priority", "0"),
        ("Callbacks.__init__", "sorted(callbacks", "sorted(reversed(callbacks)"),
        ("Callbacks.call", "in self._begun", "in reversed(self._begun)"),
    ],
    ids=["ascending", "without priorities", "ties reversed", "calls reversed"],
)
def test_a_planted_mistake_in_the_order_is_noticed(target: str, old: str, new: str) -> None:
    with planted(f"training.callbacks:{target}", old, new), pytest.raises(AssertionError):
        _check_priorities()


def _built_in() -> list[Callback]:
    run = tiny_run(**SMALL)
    return [*built_in_callbacks(run, []), *feature_callbacks(run)]


def test_callbacks_of_the_library_have_priorities_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users' callbacks of priority 0 run between all built-in ones and those that must be last."""

    def check() -> None:
        priorities = [callback.priority for callback in _built_in()]
        assert len(priorities) == len(set(priorities)) and 0 not in priorities

    check()
    monkeypatch.setattr(BadSteps, "priority", Reports.priority)
    with pytest.raises(AssertionError):
        check()


class _SpoilOnce(Callback):
    """Writes NaN into the weights after step 3, once."""

    def after_step(self, result: StepResult) -> None:
        if self.run.state.iteration == 3 and not self.run.state.rollbacks:
            self.run.data_parallel.buckets[-1].weight_shard.fill_(torch.nan)


def _rolled_back(folder: Path) -> tuple[dict[int, float], list[int]]:
    """Reported losses, and the iteration that a user's callback sees after each step."""
    sink, seen = Sink(), []

    class Iterations(Callback):
        def after_step(self, result: StepResult) -> None:
            seen.append(self.run.state.iteration)

    settings = SMALL | {"save": str(folder), "save_interval": 2, "max_bad_steps": 1, "train_iters": 6}
    train(tiny_run(**settings), [sink], [Iterations(), _SpoilOnce()])
    return sink.losses, seen


def test_users_see_the_run_after_a_rollback_and_reports_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, seen = _rolled_back(tmp_path / "right")
    assert seen == [1, 2, 3, 4, 2, 3, 6]
    assert [iteration for iteration, loss in losses.items() if loss != loss] == [4, 5]
    monkeypatch.setattr(BadSteps, "priority", Reports.priority + 1)
    losses, _ = _rolled_back(tmp_path / "wrong")
    assert [iteration for iteration, loss in losses.items() if loss != loss] != [4, 5]


class StopAfter(Callback):
    """Keeps the losses of all steps; on the last rank, requests a stop after a step."""

    def __init__(self, iteration: int) -> None:
        self.iteration, self.losses = iteration, list[float]()

    def after_step(self, result: StepResult) -> None:
        self.losses.append(result.loss)
        if self.run.state.iteration == self.iteration and dist.get_rank() == dist.get_world_size() - 1:
            self.run.stop_reason = "a reason"


def _stopped_and_resumed(folder: Path) -> tuple[list[float], list[float], str]:
    layout = {"tensor_model_parallel_size": 2, "hidden_dropout": 0.1}
    never, first, second = StopAfter(99), StopAfter(3), StopAfter(99)
    train(tiny_run(**SMALL, **layout, train_iters=6), [], [never])
    train(tiny_run(**SMALL, **layout, train_iters=6, save=str(folder)), [], [first])
    name = find_checkpoint(str(folder)).name
    train(tiny_run(**SMALL, **layout, train_iters=6, load=str(folder)), [], [second])
    return never.losses, [*first.losses, *second.losses], name


def test_a_callback_of_one_rank_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    for whole, stopped, name in run_ranks(2, _stopped_and_resumed, tmp_path):
        assert whole == stopped and name == "iter_0000004"


class Broken(Callback):
    """Fails after step 2."""

    def after_step(self, result: StepResult) -> None:
        if self.run.state.iteration == 2:
            _ = 1 // 0


def test_an_error_is_reported_with_the_name_of_its_callback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[str, str, int]] = []
    handler = signal.getsignal(signal.SIGTERM)
    run = tiny_run(**SMALL, save=str(tmp_path))
    run.saver.open()
    with pytest.raises(ZeroDivisionError):
        train(run, [], [Broken(), Recorder(calls)])
    text = "callback Broken.after_step (priority 0) failed after iteration 2: ZeroDivisionError: integer division"
    assert capsys.readouterr().err.count(text) == 1
    assert [name for _, name, _ in calls][-2:] == ["on_failure", "close"]
    assert json.loads((tmp_path / "failures.jsonl").read_text().splitlines()[-1])["iteration"] == 2
    assert signal.getsignal(signal.SIGTERM) is handler


def test_on_failure_may_explain_the_error_but_not_hide_it(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Exception] = []

    class Explains(Callback):
        priority = MemorySnapshots.priority + 1

        def on_failure(self, error: Exception) -> None:
            raise MegatronError("explained") from error

    class Sees(Callback):
        def on_failure(self, error: Exception) -> None:
            seen.append(error)
            raise KeyError("does not hide the error")

    with pytest.raises(MegatronError, match="explained") as found:
        train(tiny_run(**SMALL), [], [Broken(), Sees(), Explains()])
    assert seen == [found.value] and isinstance(found.value.__cause__, ZeroDivisionError)
    assert "callback Sees.on_failure (priority 0) failed after iteration 2: KeyError" in capsys.readouterr().err


def test_only_callbacks_that_began_are_closed() -> None:
    calls: list[tuple[str, str, int]] = []

    class FailsToBegin(Recorder):
        def before_run(self) -> None:
            raise MegatronError("no")

    run = tiny_run(**SMALL)
    called = Callbacks(run, [Recorder(calls, "a", 1), FailsToBegin(calls, "b"), Recorder(calls, "c", -1)])
    with pytest.raises(MegatronError, match="no"), called.running():
        pytest.fail("the run began")
    begun = [("a", "before_run"), ("b", "before_run"), ("a", "on_failure"), ("a", "close")]
    assert [(label, name) for label, name, _ in calls] == begun


def test_the_failure_log_does_not_record_its_own_refusal(tmp_path: Path) -> None:
    def attempt() -> str:
        run: Run = tiny_run(**SMALL, save=str(tmp_path))
        run.saver.open()
        with pytest.raises((ZeroDivisionError, MegatronError)) as error:
            train(run, [], [Broken()])
        run.saver._locks.clear()
        return str(error.value)

    texts = [attempt() for _ in range(3)]
    assert "the same failure twice" not in texts[0] and all("the same failure twice" in text for text in texts[1:])
    lines = (tmp_path / "failures.jsonl").read_text().splitlines()
    assert len(lines) == 4, "two attempts that began and failed; the third was refused"
    assert FailureLog.priority > BadSteps.priority


def test_a_callback_may_reject_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    class Rejects(Callback):
        def is_bad(self, loss: float, grad_norm: float) -> bool:
            return self.run.state.iteration == 1

    run = tiny_run(**SMALL, train_iters=3, max_bad_steps=1)
    train(run, [], [Rejects()])
    assert run.state.skipped_iterations == 1
    assert ", rejected by a callback, at iteration 2" in capsys.readouterr().out


def test_callbacks_of_an_evaluation_alone() -> None:
    calls: list[tuple[str, str, int]] = []
    config = tiny_config(**SMALL | {"eval_iters": 1, "skip_train": True, "train_iters": None})
    pretrain(config, World(0, 1, 0, torch.device("cpu")), callbacks=[Recorder(calls)])
    assert [name for _, name, _ in calls] == ["before_run", *["after_evaluation"] * 2, "after_run", "close"]


def test_a_class_in_place_of_an_object_is_refused() -> None:
    with pytest.raises(TypeError, match="Broken'> must be objects of classes derived from"):
        Callbacks(tiny_run(**SMALL), [Broken])  # type: ignore[list-item]


class Lowest(Callback):
    """Remembers the lowest loss."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {"lowest": 1e9, "iteration": 0}

    def after_step(self, result: StepResult) -> None:
        if result.loss < self.values["lowest"]:
            self.values = {"lowest": result.loss, "iteration": self.run.state.iteration}

    def stored_values(self) -> dict[str, float]:
        return self.values

    def load_values(self, values: dict[str, float]) -> None:
        self.values = dict(values)


def test_values_of_callbacks_survive_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two callbacks of one class, and the norms among which a spike is found, continue as in an uninterrupted run."""
    settings = SMALL | {"spike_factor": 10.0, "max_bad_steps": 1, "lr": 0.5, "lr_decay_style": "constant"}
    whole = tiny_run(**settings, train_iters=6)
    callbacks = [Lowest(), Lowest()]
    train(whole, [], callbacks)
    first = tiny_run(**settings, train_iters=6, exit_interval=3, save=str(tmp_path))
    train(first, [], [Lowest(), Lowest()])
    assert first.state.iteration == 3
    resumed = tiny_run(**settings, train_iters=6, load=str(tmp_path))
    after = [Lowest(), Lowest()]
    after[1].values = {"lowest": -1.0, "iteration": -1}  # replaced by the values of the checkpoint
    train(resumed, [], after)
    assert [callback.values for callback in after] == [callback.values for callback in callbacks]
    assert resumed.state.callbacks == whole.state.callbacks
    assert len(whole.state.callbacks["BadSteps"]["norms"]) == 6
    assert sorted(whole.state.callbacks) == ["BadSteps", "Lowest", "Lowest 2"]
    assert "note: callback" not in capsys.readouterr().out


def test_a_run_says_which_values_of_callbacks_are_missing_or_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_run(**SMALL, train_iters=1, save=str(tmp_path)), [], [Lowest()])
    settings = SMALL | {"train_iters": 2, "load": str(tmp_path)}
    capsys.readouterr()
    train(tiny_run(**settings, spike_factor=10.0, max_bad_steps=1), [])
    printed = capsys.readouterr().out
    assert "note: callback BadSteps has no values in the checkpoint and starts without" in printed
    assert "has values of callback Lowest, which this run does not have; they are dropped" in printed
    train(tiny_run(**settings, finetune=True), [], [Lowest()])
    assert "note: callback" not in capsys.readouterr().out
