"""Preprocessing on a real Ray cluster of this machine: the bytes of one run, whatever dies."""

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_core.commands.corpus_report import CorpusReportFlags, corpus_report
from megatron_core.errors import ConfigError
from megatron_core.locations import location
from megatron_core.preprocess import PreprocessSettings, engines, preprocess, ray_tasks
from megatron_core.preprocess.plan import InputPart
from megatron_core.preprocess.pool import WorkerDiedError
from tests.datasets.files import write
from tests.preprocess.corpora import SMALL, outcome, settings, texts, write_jsonl
from tests.storage.server import BUCKET, s3_server

ray = pytest.importorskip("ray", reason="the optional package ray is not installed")
for package in ("s3fs", "moto.server"):
    pytest.importorskip(package, reason=f"{package} is not installed (make install-test)")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A Ray cluster of two CPUs, which the runs find, and an S3 server."""
    with s3_server() as (_, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        context = ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        patch.setenv("RAY_ADDRESS", context.address_info["address"])
        # A run disconnects from the cluster at its end; this process keeps the cluster.
        patch.setattr(ray, "shutdown", lambda: None)
        patch.setattr(ray, "init", lambda **_: None)
        yield
    ray.shutdown()


def dying_once(shared: Any, part: InputPart) -> None:
    """The task of a worker that is killed the first time it gets a part, when half of the part is written."""
    settings = shared[0]
    killed = Path(f"{settings.output_prefix}.killed") / part.name
    if not killed.exists():
        killed.parent.mkdir(exist_ok=True)
        killed.touch()
        (Path(f"{settings.output_prefix}.parts") / f"{part.name}.0123").mkdir()
        os.kill(os.getpid(), signal.SIGKILL)
    engines.write_part(shared, part)


def always_dying(shared: Any, part: InputPart) -> None:
    """The task of a worker that cannot process the second file."""
    if 1 in part.sources:
        os.kill(os.getpid(), signal.SIGKILL)
    engines.write_part(shared, part)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files, of which one is divided."""
    monkeypatch.setattr(PreprocessSettings, "part_bytes", property(lambda self: 8000))
    write_jsonl(tmp_path / "a.jsonl", texts(150))
    write_jsonl(tmp_path / "b.jsonl.gz", texts(40))
    write_jsonl(tmp_path / "c.jsonl.zst", texts(9))
    return tmp_path


def test_workers_that_are_killed_do_not_change_a_byte(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"input": (f"{corpus}/[a-c].*",), "append_eod": True}
    expected = outcome(corpus, **changes)
    monkeypatch.setattr(engines, "write_part", dying_once)
    assert outcome(corpus, engine="ray", **changes) == expected
    assert len(list((corpus / "out.killed").iterdir())) > 2
    assert not (corpus / "out.parts").exists()


def test_input_in_object_storage(corpus: Path) -> None:
    names = ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst")
    expected = outcome(corpus, input=tuple(str(corpus / name) for name in names))
    for name in names:
        location(f"s3://{BUCKET}/texts/{name}").write_bytes((corpus / name).read_bytes())
    remote = outcome(corpus, engine="ray", input=(f"s3://{BUCKET}/texts/*.jsonl*",))
    assert {n: text for n, text in remote.items() if n != "_problems.txt"} == {
        n: text for n, text in expected.items() if n != "_problems.txt"
    }


def test_a_part_on_which_workers_always_die_ends_the_run(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"input": (f"{corpus}/[a-c].*",)}
    expected = outcome(corpus, **changes)
    monkeypatch.setattr(ray_tasks, "MOST_FAILURES", 2)
    with monkeypatch.context() as patch:
        patch.setattr(engines, "write_part", always_dying)
        with pytest.raises(WorkerDiedError, match=r"workers died 2 times on .*b.jsonl.gz, byte 0 on.*continues"):
            preprocess(settings(corpus, engine="ray", **changes), SMALL)
    assert outcome(corpus, engine="ray", **changes) == expected


def test_an_error_of_a_task_is_the_error_of_the_run(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "write_part", other_tokenizer)
    with pytest.raises(ConfigError, match="another tokenizer"):
        preprocess(settings(corpus, engine="ray", input=(f"{corpus}/a.jsonl",)), SMALL)


def other_tokenizer(shared: Any, part: InputPart) -> None:
    """A task that fails."""
    raise ConfigError("another tokenizer")


def test_the_report_of_a_corpus_is_that_of_one_machine(tmp_path: Path) -> None:
    documents = [[n % 7, n % 5] * (n % 9) for n in range(500)]
    prefix = write(tmp_path / "corpus", documents)
    results = []
    for engine in ("local", "ray"):
        output = tmp_path / f"{engine}.json"
        corpus_report(CorpusReportFlags(input=(prefix,), output=str(output), engine=engine, workers=2))
        results.append(output.read_bytes())
    counts = Counter(map(tuple, filter(None, documents)))
    repeated = sum(counts.values()) - len(counts)
    assert results[0] == results[1] and json.loads(results[1])["corpus"]["duplicates"] == repeated > 100
