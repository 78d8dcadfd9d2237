"""TorchX and SkyPilot by their own programs: a training that TorchX starts, and the task that SkyPilot reads.

python -m venv .venv/engines && .venv/engines/bin/pip install torchx skypilot
python -m tests.end_to_end.engine_clients --out runs/engine_clients.json

TorchX trains `examples/torchx_train.py` undisturbed, and a second time until SIGTERM, after which it saves; the same
command must resume from that step and end with the tensors of the first training, bit for bit. SkyPilot must accept
`examples/skypilot.yaml`, and refuse it with a misspelt key; no cloud is asked.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.end_to_end.slurm_job import RESUMED, ROOT, STEPS, TRAINING, hashes, saved_iteration, wait_for

ACCELERATORS = "AcceleratorName,Clouds\nH100,\"['AWS']\"\n"
"""SkyPilot's list of accelerators, which it would download: the one of the example."""
READ_TASK = """
import sys, yaml, sky
values = yaml.safe_load(open(sys.argv[1]))
task = sky.Task.from_yaml_config(values, env_overrides=[("BUCKET", "bucket")])
with sky.Dag() as dag:
    dag.add(task)
dag.validate()
(resources,) = task.resources
print(task.num_nodes, resources.accelerators["H100"], resources.use_spot, sky.__version__)
try:
    sky.Task.from_yaml_config(values | {"num_node": 3})
except ValueError as error:
    print(str(error).splitlines()[-1])
"""


class Training:
    """The example's component on this machine."""

    def __init__(self, engines: Path, folder: Path) -> None:
        self.save = folder / "checkpoints"
        self._torchx = engines / "bin" / "torchx"
        self._folder = folder
        folder.mkdir()

    def start(self) -> subprocess.Popen:
        """Start TorchX, which waits for the ranks."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}
        words = [str(self._torchx), "run", "--scheduler", "local_cwd", "-cfg", f"log_dir={self._folder / 'logs'}"]
        words += ["--wait", "examples/torchx_train.py:train", "--save", str(self.save), "--", *TRAINING]
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        """Output of all attempts."""
        return (self._folder / "log").read_text()


def train_with_torchx(engines: Path, folder: Path) -> dict[str, object]:
    """The two trainings."""
    reference = Training(engines, folder / "undisturbed")
    assert reference.start().wait(400) == 0, reference.log[-6000:]
    training = Training(engines, folder / "disturbed")
    client = training.start()
    wait_for(lambda: saved_iteration(training.save) >= 20 or client.poll() is not None, "checkpoint 20")
    client.send_signal(signal.SIGTERM)
    client.wait(60)
    saved = saved_iteration(training.save)
    assert 20 <= saved < STEPS, training.log[-6000:]
    assert training.start().wait(400) == 0, training.log[-6000:]
    resumed = [int(number) for number in RESUMED.findall(training.log)]
    equal = hashes(training.save) == hashes(reference.save)
    assert equal and resumed == [saved] and saved_iteration(training.save) == STEPS, training.log[-6000:]
    version = subprocess.run([engines / "bin" / "torchx", "--version"], capture_output=True, text=True, check=True)
    return {"saved": saved, "resumed from": resumed, "equal": equal, "torchx": version.stdout.strip()}


def read_with_skypilot(engines: Path, folder: Path) -> dict[str, object]:
    """The task of the example, as SkyPilot reads it."""
    catalog = folder / ".sky" / "catalogs" / "v8" / "common"
    catalog.mkdir(parents=True)
    (catalog / "accelerators.csv").write_text(ACCELERATORS)
    words = [str(engines / "bin" / "python"), "-c", READ_TASK, str(ROOT / "examples" / "skypilot.yaml")]
    environment = os.environ | {"HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    accepted, refused = result.stdout.strip().splitlines()[-2:]
    nodes, accelerators, spot, version = accepted.split()
    assert (nodes, accelerators, spot) == ("2", "8", "True") and "num_node" in refused, result.stdout
    return {"skypilot": version, "refused": refused}


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, default=ROOT / ".venv" / "engines", help="virtual environment")
    parser.add_argument("--out", type=Path, default=Path("runs/engine_clients.json"))
    flags = parser.parse_args()
    engines = flags.engines.absolute()
    folder = Path(tempfile.mkdtemp(prefix="engine_clients_"))
    result = {"torchx": train_with_torchx(engines, folder), "skypilot": read_with_skypilot(engines, folder)}
    print(json.dumps(result))
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
