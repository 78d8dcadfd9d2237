"""A real etcd as torchrun's rendezvous: launchers that are lost, replaced and preempted, and etcd itself restarted.

apt-get install etcd-server; pip install python-etcd
python -m tests.end_to_end.etcd_rendezvous --out runs/etcd.json

Two launchers with one rank each train an undisturbed job, and a second job in which etcd is restarted, a launcher and
its rank are killed by SIGKILL, a launcher gets SIGTERM, and finally both do. A new launcher replaces a lost one, as by
a scheduler. Each attempt must resume from the newest checkpoint, and the last one must have the tensors of the
undisturbed job bit for bit.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.end_to_end.slurm_job import (
    RESUMED,
    ROOT,
    STEPS,
    TRAINING,
    hashes,
    leave_out_without,
    saved_iteration,
    wait_for,
)


class Etcd:
    """A server of etcd, with the second version of its interface, which torch uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = (free_port(), free_port())
        self.start()

    @property
    def address(self) -> str:
        """Host and port for clients."""
        return f"127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        """Start the server with the data of the one before."""
        clients, peers = (f"http://127.0.0.1:{port}" for port in self._ports)
        words = ["etcd", "--enable-v2", "--data-dir", str(self._folder / "etcd"), "--listen-client-urls", clients]
        words += ["--advertise-client-urls", clients, "--listen-peer-urls", peers]
        words += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        wait_for(self._is_healthy, "answer of etcd", 30)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=2) as answer:
                return json.load(answer)["health"] == "true"
        except OSError:
            return False

    def kill(self) -> None:
        """End the server without notice."""
        self._process.kill()
        self._process.wait()


def free_port() -> int:
    """A port that no server uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Job:
    """A training with two launchers, each of which has one rank."""

    def __init__(self, folder: Path, etcd: Etcd) -> None:
        self.folder = folder
        self.save = folder / "checkpoints"
        self._etcd = etcd
        folder.mkdir()
        self.launchers = [self.launch(), self.launch()]

    def launch(self) -> subprocess.Popen:
        """Start a launcher."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "5"]
        words += ["--rdzv-backend", "etcd-v2", "--rdzv-endpoint", self._etcd.address, "--rdzv-id", self.folder.name]
        words += ["pretrain_gpt.py", *TRAINING, "--elastic", "--save", str(self.save), "--load", str(self.save)]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log)

    def wait_for_save(self, iteration: int) -> None:
        """Wait until a checkpoint of an iteration exists."""
        running = self.launchers
        wait_for(
            lambda: self.saved >= iteration or any(launcher.poll() is not None for launcher in running),
            f"checkpoint {iteration}",
        )
        assert all(launcher.poll() is None for launcher in running), self.log[-6000:]

    def replace(self, number: int) -> None:
        """Start a launcher in place of one that has ended."""
        self.launchers[number].wait(60)
        self.launchers[number] = self.launch()

    def end(self) -> list[int]:
        """Exit statuses of the launchers."""
        return [launcher.wait(400) for launcher in self.launchers]

    @property
    def saved(self) -> int:
        """Iteration of the newest checkpoint; 0 without one."""
        return saved_iteration(self.save)

    @property
    def log(self) -> str:
        """Output of all attempts."""
        return (self.folder / "log").read_text()


@contextmanager
def engine(folder: Path) -> Iterator[Etcd]:
    """A server that ends with the context."""
    etcd = Etcd(folder)
    try:
        yield etcd
    finally:
        etcd.kill()


def kill_host(launcher: subprocess.Popen) -> None:
    """SIGKILL to a launcher and its ranks at once, as if the host lost its power."""
    for process in (*psutil.Process(launcher.pid).children(recursive=True), launcher):
        process.kill()


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/etcd.json"))
    flags = parser.parse_args()
    leave_out_without("etcd", "etcd-server")
    chance = random.Random(1)
    folder = Path(tempfile.mkdtemp(prefix="etcd_"))
    with engine(folder) as etcd:
        reference = Job(folder / "undisturbed", etcd)
        assert reference.end() == [0, 0], reference.log[-6000:]
        job = Job(folder / "disturbed", etcd)
        saved = []
        job.wait_for_save(20)
        etcd.kill()  # launchers and ranks continue without it
        etcd.start()
        job.wait_for_save(40)
        number = chance.randrange(2)
        kill_host(job.launchers[number])
        saved.append(job.saved)
        job.replace(number)
        job.wait_for_save(saved[-1] + 20)
        number = chance.randrange(2)
        job.launchers[number].send_signal(signal.SIGTERM)
        job.launchers[number].wait(60)
        saved.append(job.saved)
        job.replace(number)
        job.wait_for_save(saved[-1] + 20)
        for launcher in job.launchers:
            launcher.send_signal(signal.SIGTERM)
        preempted = job.end()
        saved.append(job.saved)
        job.launchers = [job.launch(), job.launch()]
        assert job.end() == [0, 0], job.log[-6000:]
    resumed = [int(number) for number in RESUMED.findall(job.log)]
    equal = hashes(job.save) == hashes(reference.save)
    version = re.search(r"[\d.]+", subprocess.run(["etcd", "--version"], capture_output=True, text=True).stdout)
    result = {"saved": saved, "resumed from": resumed, "statuses after SIGTERM": preempted, "equal": equal}
    result["etcd"] = version[0] if version else ""
    print(json.dumps(result))
    assert equal and resumed == saved and job.saved == STEPS, job.log[-6000:]
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
