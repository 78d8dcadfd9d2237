"""A run's small files and its failures, with checkpoints in object storage (in memory here) and several machines."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_core import parallel_state
from megatron_core.config import RunConfig
from megatron_core.errors import MegatronError
from megatron_core.locations import CACHE_VARIABLE, location, run_folder
from megatron_core.parallel import World
from megatron_core.resilience.failure_log import FILE, OF_FAILURES, FailureLog
from megatron_core.storage.run_files import NOT_COPIED, FetchedFiles, RunFiles
from megatron_core.training.callbacks import Callback
from megatron_core.training.loop import train
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_config, tiny_run

CPU = torch.device("cpu")


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield f"memory://bucket/{uuid.uuid4().hex}"
    torch.set_num_threads(threads)
    parallel_state.destroy_model_parallel()


class Part:
    """The parts of ``Run`` that these callbacks use."""

    def __init__(self, config: RunConfig, rank: int = 0) -> None:
        self.config, self.world = config, World(rank, 2, 0, CPU)

    def store(self) -> None:
        RunFiles(self).close()  # type: ignore[arg-type]


def test_machines_that_continue_a_run_in_turn(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(save=save)
    names = ("metrics.jsonl", "metrics.ranks/rank00000.jsonl", "config.yaml")

    def machine(name: str) -> Path:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / name))
        (run_folder(save) / "metrics.ranks").mkdir(parents=True, exist_ok=True)
        FetchedFiles(Part(config))  # type: ignore[arg-type]
        return run_folder(save)

    a = machine("a")
    for name in names:
        (a / name).write_text("first")
    Part(config).store()
    b = machine("b")
    assert a != b and [(b / name).read_text() for name in names] == ["first"] * 3
    for name, text in zip(names, ("first, second", "new", "other"), strict=True):  # longer, shorter, as long
        (b / name).write_text(text)
    Part(config).store()
    assert machine("a") == a
    assert [(a / name).read_text() for name in names] == ["first, second", "new", "other"]
    # What a killed job on this machine has not stored is kept, as long as no other machine continues the run.
    (a / "metrics.jsonl").write_text("first, second, third")
    machine("a")
    assert (a / "metrics.jsonl").read_text() == "first, second, third"
    # Another rank, on another host, neither stores nor fetches.
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "b"))
    (b / "config.yaml").write_text("of rank 1")
    Part(config, rank=1).store()
    FetchedFiles(Part(config, rank=1))  # type: ignore[arg-type]
    assert (location(save) / "config.yaml").read_text() == "other" and (b / "config.yaml").read_text() == "of rank 1"


class Broken(Callback):
    """Fails after step 2."""

    def after_step(self, result: StepResult) -> None:
        if self.run.state.iteration == 2:
            _ = 1 // 0


def test_failures_are_kept_with_the_checkpoints(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for attempts on different machines; after the object in the message is deleted, the run may start."""
    log, numbers = location(save) / FILE, iter(range(9))

    def attempt(*callbacks: Callback) -> str:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / str(next(numbers))))
        run: Run = tiny_run(num_layers=1, eval_iters=0, train_iters=3, save=save)
        run.saver.open()
        try:
            train(run, [], callbacks)
        except (ZeroDivisionError, MegatronError) as error:
            return str(error)
        return ""

    texts = [attempt(Broken()) for _ in range(3)]
    assert [text.startswith("the same failure twice in iteration 2") for text in texts] == [False, True, True]
    assert texts[2].endswith(f"then remove {log}") and len(log.read_text().splitlines()) == 4
    log.unlink()
    assert "division" in attempt(Broken()) and log.is_file()
    assert attempt() == "" and not log.exists() and not list(log.parent.glob("failures.*"))


def test_the_copies_leave_out_the_objects_of_the_failure_log() -> None:
    """The core does not import the log, so that the beginning of its names is written twice."""
    assert NOT_COPIED == OF_FAILURES and FILE.startswith(NOT_COPIED)


def _attempt(folder: Path) -> tuple[str, str]:
    """Begin with a list of failures that only rank 0 has, then with one that only rank 0 refuses."""
    rank = dist.get_rank()
    own = folder / str(rank)
    own.mkdir()
    log = FailureLog(Part(tiny_config(save=str(folder)), rank))  # type: ignore[arg-type]
    log._path = own / FILE
    if rank == 0:
        begins, fails = f'{{"begins": "{log._digest}"}}\n', '{"iteration": 5, "error": "ValueError: N", "rank": 1}\n'
        (own / FILE).write_text((begins + fails) * 2)
    found = []
    for _ in range(2):
        with pytest.raises(MegatronError) as error:
            log.before_run()
        found.append(str(error.value))
        if rank == 0:
            (own / FILE).write_text("of another program")
    return found[0], found[1]


def test_all_hosts_refuse_an_attempt(tmp_path: Path) -> None:
    for first, second in run_ranks(2, _attempt, tmp_path):
        assert "the same failure twice in iteration 5: ValueError: N" in first
        assert "exists and is not a list of failures" in second
