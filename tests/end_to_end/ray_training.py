"""A real Ray cluster of two raylets: a training of `examples/ray_train.py` that loses workers and a raylet.

python -m tests.end_to_end.ray_training --out runs/ray_training.json

One run is undisturbed. In the other, a worker of the training is killed by SIGKILL, then the raylet that runs a rank,
which is replaced. The run must end with the tensors of the undisturbed one, bit for bit, and may repeat only steps that
were not saved.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.end_to_end.slurm_job import ROOT, TRAINING, hashes, saved_iteration, wait_for
from tests.preprocess.ray_chaos import workers_of

STEPS = 80


def start(cluster: Cluster, storage: Path) -> subprocess.Popen:
    """The driver."""
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Without Ray's dashboard its state cannot be read, which would be logged each second.
    environment["RAY_TRAIN_ENABLE_STATE_TRACKING"] = "0"
    words = ["examples/ray_train.py", "--workers", "2", "--storage", str(storage), "--name", "run", "--", *TRAINING]
    words += [
        "--train-iters",
        str(STEPS),
        "--log-interval",
        "10",
    ]  # a report to Ray takes longer than a step of this model
    with (storage / "log").open("ab") as log:
        return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log)


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ray_training.json"))
    flags = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ray_training_"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    chance = random.Random(1)
    seen = []
    try:
        for name in ("undisturbed", "disturbed"):
            storage = folder / name
            storage.mkdir()
            checkpoints = storage / "run" / "checkpoints"
            driver = start(cluster, storage)
            if name == "disturbed":
                for iteration, kind in ((20, "worker"), (40, "raylet")):
                    wait_for(partial(has_saved, checkpoints, iteration, driver), "checkpoint", 400)
                    assert driver.poll() is None, (storage / "log").read_text()[-4000:]
                    node = chance.choice([node for node in nodes if training_workers(node)])
                    seen.append({"killed": kind, "saved": saved_iteration(checkpoints)})
                    if kind == "worker":
                        training_workers(node)[0].kill()
                    else:
                        cluster.remove_node(node, allow_graceful=False)
                        nodes = [other for other in nodes if other is not node] + [cluster.add_node(num_cpus=1)]
            # The raylet may have had Ray's controller of the training, with which the driver ends.
            if driver.wait(400) and seen:
                driver = start(cluster, storage)
            assert driver.wait(400) == 0, (storage / "log").read_text()[-4000:]
        log = (folder / "disturbed" / "log").read_text()
        resumed = [int(number) for number in re.findall(r"resuming from iteration (\d+)", log)]
        equal = hashes(checkpoints) == hashes(folder / "undisturbed" / "run" / "checkpoints")
    finally:
        cluster.shutdown()
    result = {"kills": seen, "resumed from": resumed, "equal": equal, "ray": ray.__version__}
    print(json.dumps(result))
    assert equal and saved_iteration(checkpoints) == STEPS
    assert all(any(number >= kill["saved"] for number in resumed) for kill in seen), log[-6000:]
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(folder)


def has_saved(checkpoints: Path, iteration: int, driver: subprocess.Popen) -> bool:
    """Whether there is a checkpoint of an iteration, or the driver has ended."""
    return saved_iteration(checkpoints) >= iteration or driver.poll() is not None


def training_workers(node: object) -> list[psutil.Process]:
    """The ranks on a raylet."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [worker for worker in workers_of(raylet) if "RayTrainWorker" in " ".join(worker.cmdline())]


if __name__ == "__main__":
    main()
