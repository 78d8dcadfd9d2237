"""A run monitored by real programs: Prometheus, the reader of TensorBoard, the server of MLflow, and offline W&B.

apt-get install prometheus prometheus-node-exporter
pip install --target CLIENTS mlflow grafana-foundation-sdk
python -m tests.reports.monitoring_servers --clients CLIENTS --out runs/monitoring.json

A model with experts trains while a Prometheus scrapes it each second, with the rules of `examples/monitoring`, whose
minutes are seconds. Its loss spikes, its experts collapse, it is stopped by SIGSTOP and continues: the alerts must
fire in this order, and end. Each panel of the dashboard must have data, and all values that Prometheus, TensorBoard,
MLflow and Weights & Biases have stored must be those of metrics.jsonl.
"""

import argparse
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.programs import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "monitoring"
TRAINING = [
    *("--mock-data", "--vocab-size", "64", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--micro-batch-size", "4", "--global-batch-size", "4", "--fp64", "--swiglu"),
    *("--train-iters", "1000000", "--lr", "1e-2", "--lr-decay-style", "constant", "--eval-interval", "50"),
    *("--eval-iters", "1", "--num-experts", "8", "--moe-router-topk", "2", "--moe-router-score-function", "sigmoid"),
    *("--moe-router-enable-expert-bias", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
]
# In offline mode no data leaves this machine.
QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "OMP_NUM_THREADS": "1"}


@contextmanager
def program(log: Path, *words: str, **environment: str) -> Iterator[subprocess.Popen]:
    """A running program, which is killed at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, cwd=ROOT, env=os.environ | environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def get(url: str, **values: str) -> Any:
    """The JSON that a server answers."""
    with urlopen(f"{url}?{urlencode(values)}", timeout=10) as answer:
        return json.load(answer)


def wait_for(condition: Callable[[], bool], name: str, seconds: float = 120) -> float:
    """Wait until a condition holds; the number of seconds."""
    began = time.monotonic()
    while True:
        try:
            if condition():
                return time.monotonic() - began
        except OSError:  # the server does not answer yet
            pass
        if time.monotonic() > began + seconds:
            raise SystemExit(f"no {name} after {seconds:.0f} s")
        time.sleep(0.3)


class Prometheus:
    """A client of the server's interface."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        return get(f"{self._url}/query", query=expression)["data"]["result"]

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = get(f"{self._url}/alerts")["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


def configuration(folder: Path, exporter: int) -> Path:
    """The example's configuration and rules, with seconds for minutes, and the exporter's port."""
    text = (EXAMPLES / "prometheus.yaml").read_text().replace("9100", str(exporter)).replace("15s", "1s")
    (folder / "prometheus.yaml").write_text(text)
    rules = re.sub(r"(\[|offset |for: )(\d+)m", r"\1\2s", (EXAMPLES / "alerts.yaml").read_text())
    (folder / "alerts.yaml").write_text(rules)
    return folder / "prometheus.yaml"


def provoke(prometheus: Prometheus, training: subprocess.Popen, folder: Path) -> dict[str, float]:
    """Plant the faults one after another; the seconds until each alert fired."""
    seconds = {}

    def expect(name: str) -> None:
        seconds[name] = round(wait_for(lambda: name in prometheus.firing(), name), 1)
        assert training.poll() is None, "the training has ended"

    wait_for(lambda: bool(prometheus.query("megatron_iteration offset 35s > 0")), "history of 35 s", 300)
    assert prometheus.firing() == set(), "alerts of a healthy run"
    (folder / "spike").touch()
    expect("MegatronLossSpike")
    (folder / "spike").unlink()
    (folder / "collapse").touch()
    expect("MegatronExpertCollapse")
    expect("MegatronExpertStarves")
    training.send_signal(signal.SIGSTOP)
    expect("MegatronStalled")
    training.send_signal(signal.SIGCONT)
    wait_for(lambda: prometheus.firing().isdisjoint({"MegatronStalled", "MegatronLossSpike"}), "end of the alerts")
    return seconds


def panels_with_data(prometheus: Prometheus) -> int:
    """Number of the dashboard's panels, whose expressions must all have series."""
    panels = json.loads((EXAMPLES / "grafana_dashboard.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$run", "run").replace("[15m]", "[15s]")
            assert prometheus.query(expression), f"{panel['title']}: no data for {expression}"
    return len(panels)


Scalars = dict[int, dict[str, float]]
"""The values of each step by tag."""


def compare(name: str, stored: Scalars, expected: Scalars, complete: bool, digits: float = 0.0) -> int:
    """The number of equal values; an AssertionError for another value, or a missing step if all must be stored."""
    assert stored and (stored.keys() == expected.keys() if complete else stored.keys() <= expected.keys()), name
    count = 0
    for step, values in stored.items():
        for tag, value in values.items():
            assert abs(value - expected[step][tag]) <= digits * abs(value), (name, step, tag, value, expected[step])
            count += 1
    return count


def recorded(metrics: Path) -> Scalars:
    """The steps in metrics.jsonl, by their tags."""
    names = {"lm loss": "loss", "grad-norm": "grad_norm", "learning-rate": "learning_rate"}
    records = map(json.loads, metrics.read_text().splitlines())
    return {r["iteration"]: {tag: r[name] for tag, name in names.items()} for r in records if r["kind"] == "step"}


def scraped(prometheus: Prometheus) -> Scalars:
    """The samples that Prometheus has stored."""
    names = {"lm loss": "megatron_lm_loss", "grad-norm": "megatron_grad_norm"}

    def samples(name: str) -> dict[float, str]:
        """The values of a metric by the time of the scrape."""
        return dict(prometheus.query(f'{name}{{run="run"}}[1h]')[0]["values"])

    values = {tag: samples(name) for tag, name in names.items()}
    iterations = samples("megatron_iteration").items()
    return {int(step): {tag: float(values[tag][at]) for tag in names} for at, step in iterations if int(step)}


def of_tensorboard(folder: Path, expected: Scalars) -> Scalars:
    """The scalars that TensorBoard's reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    stored: Scalars = {}
    for tag in next(iter(expected.values())):
        for event in events.Scalars(tag):
            stored.setdefault(event.step, {})[tag] = event.value
    return stored


def of_mlflow(address: str, expected: Scalars) -> Scalars:
    """The history of the metrics on MLflow's server."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("e")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["num_experts"] == "8", run.info
    stored: Scalars = {}
    for tag in next(iter(expected.values())):
        for metric in client.get_metric_history(run.info.run_id, tag):
            stored.setdefault(metric.step, {})[tag] = metric.value
    return stored


def of_wandb(folder: Path, expected: Scalars) -> Scalars:
    """The history in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("run-*.wandb")
    stored: Scalars = {}
    for data in log_records(path.read_bytes()):
        record = Record.FromString(data)
        values = {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
        if "lm loss" in values:
            stored[record.history.step.num] = {tag: json.loads(values[tag]) for tag in next(iter(expected.values()))}
    return stored


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which wandb uses after a header of 7 bytes."""
    position = 7
    record = b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def grafana_schema(clients: Path) -> str:
    """Check the dashboard with Grafana's classes; their version."""
    words = [sys.executable, "-m", "tests.reports.grafana_schema", str(EXAMPLES / "grafana_dashboard.json")]
    environment = os.environ | {"PYTHONPATH": str(clients)}
    return subprocess.run(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/monitoring.json"))
    flags = parser.parse_args()
    for words in (["check", "config", "prometheus.yaml"], ["check", "rules", "alerts.yaml"], ["test", "rules"]):
        subprocess.run(["promtool", *words, *(["alerts_test.yaml"] * (len(words) == 2))], cwd=EXAMPLES, check=True)
    schema = grafana_schema(flags.clients)
    folder = Path(tempfile.mkdtemp(prefix="monitoring_"))
    save = folder / "save"
    published = folder / "published"
    published.mkdir()
    exporter, server, tracking = (free_port() for _ in range(3))
    address = f"http://127.0.0.1:{tracking}"
    prometheus = Prometheus(server)
    os.environ |= QUIET
    with ExitStack() as stack:

        def start(name: str, *words: str, **environment: str) -> subprocess.Popen:
            return stack.enter_context(program(folder / name, *words, **environment))

        textfiles = ["--collector.textfile", f"--collector.textfile.directory={published}"]
        start("exporter.log", "prometheus-node-exporter", f"--web.listen-address=127.0.0.1:{exporter}", *textfiles)
        store = ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}", "--workers", "1"]
        listen = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(tracking)]
        start("mlflow.log", sys.executable, *listen, *store, PYTHONPATH=str(flags.clients))
        settings = f"--config.file={configuration(folder, exporter)}"
        listening = f"--web.listen-address=127.0.0.1:{server}"
        start("prometheus.log", "prometheus", settings, listening, f"--storage.tsdb.path={folder / 'tsdb'}")
        wait_for(lambda: urlopen(f"{address}/health", timeout=5).status == 200, "MLflow server", 300)
        outputs = ["--save", str(save), "--tensorboard-dir", str(folder / "tensorboard"), "--wandb-project", "p"]
        outputs += ["--prometheus-file", str(published / "run.prom"), "--mlflow-experiment", "e"]
        module = [sys.executable, "-m", "tests.reports.monitored_run", str(folder)]
        training = start("run.log", *module, *TRAINING, *outputs, "--mlflow-tracking-uri", address)
        seconds = provoke(prometheus, training, folder)
        panels = panels_with_data(prometheus)
        samples = scraped(prometheus)
        training.terminate()
        assert training.wait(120) == 0, (folder / "run.log").read_text()[-4000:]
        expected = recorded(save / "metrics.jsonl")
        stored_by_mlflow = of_mlflow(address, expected)
    values = {
        "prometheus": compare("prometheus", samples, expected, complete=False),
        # TensorBoard stores float32
        "tensorboard": compare("tensorboard", of_tensorboard(folder / "tensorboard", expected), expected, True, 1e-7),
        "mlflow": compare("mlflow", stored_by_mlflow, expected, complete=True),
        "wandb": compare("wandb", of_wandb(save, expected), expected, complete=True),
    }
    result = {"steps": len(expected), "equal values": values, "seconds until the alert": seconds, "panels": panels}
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(result | {"grafana schema": schema}, indent=2) + "\n")
    print(flags.out.read_text())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
