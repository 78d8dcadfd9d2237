"""Training from and to a local S3 server: one rank, resumed on two; a server that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_core.checkpoint import CheckpointReader
from megatron_core.locations import CACHE_VARIABLE, in_storage, location
from megatron_core.reports.tensor_hashes import checkpoint_hashes
from megatron_core.storage.paths import StoragePath
from tests.datasets.files import write
from tests.programs import run_program
from tests.storage.server import BUCKET, s3_server

for package in ("s3fs", "moto.server"):
    pytest.importorskip(package, reason=f"{package} is not installed (make install-test)")
ROOT = Path(__file__).parents[2]
MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--vocab-size", "64", "--micro-batch-size", "2", "--global-batch-size", "4", "--eval-iters", "0", "--fp64"),
    *("--lr", "1e-2", "--lr-decay-style", "constant", "--attention-dropout", "0", "--hidden-dropout", "0"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    cache = tmp_path_factory.mktemp("cache")
    with s3_server() as (_, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in (environment | {CACHE_VARIABLE: str(cache)}).items():
            patch.setenv(name, value)
        yield environment


def train(ranks: int, *flags: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``megatron-train`` on 1 or 2 ranks."""
    launcher = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    words = ["-m", "megatron_core.commands.train", *launcher, *MODEL, *map(str, flags)]
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=300, check=False
    )


def test_an_object_appears_when_its_writer_is_closed(server: dict[str, str]) -> None:
    folder = in_storage(location(f"s3://{BUCKET}/objects"))
    assert isinstance(folder, StoragePath)
    for name, end in (("a", "close"), ("b", "discard")):
        writer = (folder / name).writer()
        writer.write(bytes(6_000_000))
        assert not (folder / name).exists()
        getattr(writer, end)()
        writer.discard()
    assert (folder / "a").stat().st_size == 6_000_000 and not (folder / "b").exists()
    assert [path.name for path in folder.iterdir()] == ["a"]


@pytest.mark.drawn(0)
def test_runs_train_and_resume(server: dict[str, str], tmp_path: Path) -> None:
    disk = write(tmp_path / "corpus", [list(range(1, 60))] * 20)
    remote = f"s3://{BUCKET}/data/corpus"
    for suffix in (".bin", ".idx"):
        location(f"{remote}{suffix}").write_bytes(Path(f"{disk}{suffix}").read_bytes())
    save = f"s3://{BUCKET}/run"
    more = ("--save", save, "--load", save, "--save-interval", 1, "--keep-last", 2, "--async-save")
    first = train(1, "--data-path", remote, "--train-iters", 3, *more)
    assert first.returncode == 0, first.stderr
    again = train(2, "--data-path", remote, "--train-iters", 5, *more, "--tensor-model-parallel-size", 2)
    assert again.returncode == 0 and "resuming from iteration 3" in again.stdout, again.stderr
    whole = run_program(
        "pretrain_gpt.py", *MODEL, "--data-path", disk, "--train-iters", 5, "--save", tmp_path / "whole"
    )
    assert whole.returncode == 0, whole.stderr
    assert sorted(path.parent.name for path in location(save).glob("iter_*/manifest.json")) == [
        "iter_0000004",
        "iter_0000005",
    ]
    with (
        CheckpointReader(location(save) / "iter_0000005") as ours,
        CheckpointReader(tmp_path / "whole" / "iter_0000005") as theirs,
    ):
        assert ours.manifest.tensors.keys() == theirs.manifest.tensors.keys()
        for name in theirs.manifest.tensors:
            assert (ours.read(name) - theirs.read(name)).abs().max() < 1e-12, name
        assert len(checkpoint_hashes(ours)) == len(theirs.manifest.tensors)
    metrics = (location(save) / "metrics.jsonl").read_text()
    assert [f'"iteration": {n},' in metrics or f'"iteration":{n},' in metrics for n in range(1, 6)] == [True] * 5


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("environment", "save", "said"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, BUCKET, "the object storage failed"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, BUCKET, "credentials"),
        ({}, "no-such-bucket", "bucket does not exist"),
    ],
)
def test_storage_that_cannot_be_used(server: dict[str, str], environment: dict[str, str], save: str, said: str) -> None:
    """One error before the first step."""
    begin = time.monotonic()
    no_file = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}
    done = train(1, "--mock-data", "--train-iters", 2, "--save", f"s3://{save}/run", **no_file, **environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"s3://{save}/run" in line and said in line and time.monotonic() - begin < 120


@pytest.mark.whole_matrix  # the clients try again for a minute
def test_a_server_that_is_lost(tmp_path: Path) -> None:
    """Saves fail with one note each and training continues; the last save is an error."""
    with s3_server() as (process, environment):
        cache = {CACHE_VARIABLE: str(tmp_path)}
        code = (
            "import os, signal, megatron_core.training.loop as loop\n"
            "from megatron_core.commands.train import main\n"
            "due = loop.save_when_due\n"
            "def lose(run, called):\n"
            f"    if run.state.iteration == 2: os.kill({process.pid}, signal.SIGKILL)\n"
            "    return due(run, called)\n"
            "loop.save_when_due = lose\n"
            "main()\n"
        )
        words = [*MODEL, "--mock-data", "--train-iters", "3", "--save", f"s3://{BUCKET}/run", "--save-interval", "1"]
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            cwd=ROOT,
            env=os.environ | environment | cache | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stdout.count("saving failed") >= 1 and "Training continues" in done.stdout, done.stdout
    assert "the object storage failed" in done.stderr
