"""Training continues if outputs become full, closed or unwritable, with one warning each."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_core.errors import ConfigError
from megatron_core.monitor.sinks import JsonLinesSink, LenientSink, lenient_output
from megatron_core.reports.metric_sinks import PrometheusSink, TensorBoardSink
from megatron_core.reports.metrics import read_metrics
from megatron_core.verify.ranks import run_ranks
from tests.monitor.examples import step, validation

ROOT = Path(__file__).parents[2]
SINKS = {
    "metrics_file": lambda folder: JsonLinesSink(folder / "metrics.jsonl"),
    "prometheus_file": lambda folder: PrometheusSink(folder / "run.prom"),
    "tensorboard_dir": TensorBoardSink,
}


def _fill(folder: Path, name: str) -> str:
    """Steps before, during and after a full disk, simulated by a limit on file sizes; returns the warnings."""
    sys.stderr = (folder / "warnings").open("w+")
    folder = folder / "reports"
    folder.mkdir()
    sink = LenientSink(SINKS[name](folder))
    sink.on_step(step(1))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for iteration in range(2, 6):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100 if name != "tensorboard_dir" else 10, limits[1]))
        sink.on_step(step(iteration))
        sink.on_validation(validation(iteration))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    sink.on_step(step(6))
    sink.close()
    sys.stderr.seek(0)
    return sys.stderr.read()


def test_prometheus_replaces_no_device(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.prom")
    with pytest.raises(ConfigError, match=r"prometheus_file=.*it exists and is not a regular file"):
        PrometheusSink(tmp_path / "run.prom")
    assert (tmp_path / "run.prom").is_fifo()


@pytest.mark.parametrize("name", SINKS)
def test_a_full_disk(name: str, tmp_path: Path) -> None:
    (said,) = run_ranks(1, _fill, tmp_path, name)
    assert said == f"note: {name} cannot be written: File too large; training continues\n"
    if name == "metrics_file":  # with space again, it continues there
        assert [record["iteration"] for record in read_metrics(tmp_path / "reports/metrics.jsonl")] == [1, 6]
    if name == "prometheus_file":
        assert 'megatron_iteration{run="run"} 6.0' in (tmp_path / "reports/run.prom").read_text()


@pytest.mark.parametrize("to", ["> /dev/full", "| true"])
def test_standard_output(to: str) -> None:
    code = (
        "import sys, time\n"
        "from megatron_core.monitor.sinks import lenient_output\n"
        "with lenient_output():\n"
        "    for _ in range(5):\n"
        "        time.sleep(0.1); print('x' * 10000, flush=True)\n"
        "sys.exit(7)"
    )
    script = f'{sys.executable} -c "$0" {to}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", script, code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 7
    assert done.stderr.startswith("note: standard output cannot be written: ") and done.stderr.count("\n") == 1


def test_an_output_that_can_be_written_stays_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with lenient_output():
        print("one")
        assert not sys.stdout.isatty()
    print("two")
    assert capsys.readouterr() == ("one\ntwo\n", "")
