"""Kills random parts of preprocessing runs on Ray, and compares the output with that of one machine.

python -m tests.preprocess.ray_chaos --kills 50 --out runs/ray_chaos.json

A cluster of a head and two more raylets runs on this machine. At random times a worker, a raylet with its workers, or
the driver is killed by SIGKILL; a killed raylet is replaced, and a killed driver is started again by the same command.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from tests.preprocess.corpora import texts, write_packed

KINDS = ("worker", "raylet", "driver")
WEIGHTS = (5, 2, 3)


def write_corpus(folder: Path, documents: int) -> None:
    """A plain file, which is divided, packed ones, and small ones, with broken lines."""
    lines = [json.dumps({"text": text}) if n % 50 else "{" for n, text in enumerate(texts(documents))]
    write_packed(folder / "a.jsonl", "\n".join(lines).encode())
    for number in range(8):
        write_packed(folder / f"b{number}.jsonl.gz", "\n".join(lines[number * 50 : number * 50 + 3000]).encode())
        write_packed(folder / f"c{number}.jsonl", "\n".join(lines[number::1000]).encode())


def command(folder: Path, prefix: Path, *flags: str) -> list[str]:
    """The command of a run."""
    tool = [sys.executable, "-m", "megatron_core.commands.preprocess_data", "--input", str(folder), *flags]
    options = ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod", "--part-mebibytes", "1", "--workers", "2"]
    return [*tool, *options, "--output-prefix", str(prefix)]


def digests(prefix: Path) -> dict[str, str]:
    """The hash of each file of an output."""
    paths = sorted(prefix.parent.glob(f"{prefix.name}_*"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def workers_of(raylet: psutil.Process) -> list[psutil.Process]:
    """The processes that run or await tasks on a raylet."""
    try:
        return [child for child in raylet.children(recursive=True) if child.cmdline()[:1][0].startswith("ray::")]
    except (psutil.NoSuchProcess, IndexError):
        return []


class Chaos:
    """The cluster and its killer."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(2)]
        self.kills: Counter[str] = Counter()

    def run(self, words: list[str], log: Path, most: int) -> None:
        """Run a command to its end; after `most` kills in all, nothing is killed any more."""
        environment = os.environ | {"RAY_ADDRESS": self._cluster.address, "PYTHONPATH": os.getcwd()}
        while True:
            with log.open("ab") as output:
                driver = subprocess.Popen(words, env=environment, stdout=output, stderr=output)
            while driver.poll() is None:
                try:
                    driver.wait(self._random.uniform(0.3, 5))
                except subprocess.TimeoutExpired:
                    if self.kills.total() < most:
                        self._kill(driver)
            if driver.returncode == 0:
                return
            if driver.returncode != -signal.SIGKILL:
                raise SystemExit(f"the driver ended with {driver.returncode}:\n{log.read_text()[-4000:]}")

    def _kill(self, driver: subprocess.Popen) -> None:
        kind = self._random.choices(KINDS, WEIGHTS)[0]
        node = self._random.randrange(len(self._nodes))
        raylet = psutil.Process(self._nodes[node].all_processes["raylet"][0].process.pid)
        if kind == "driver":
            driver.kill()
            driver.wait()
        elif kind == "raylet":
            self._cluster.remove_node(self._nodes[node], allow_graceful=False)
            self._nodes[node] = self._cluster.add_node(num_cpus=1)
        else:
            workers = workers_of(raylet)
            if not workers:
                return
            self._random.choice(workers).kill()
        self.kills[kind] += 1

    def stop(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--documents", type=int, default=250_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/ray_chaos.json"))
    flags = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ray_chaos_"))
    (folder / "input").mkdir()
    write_corpus(folder / "input", flags.documents)
    subprocess.run(command(folder / "input", folder / "out"), check=True, capture_output=True)
    expected = digests(folder / "out")
    chaos = Chaos(flags.seed)
    runs = 0
    started = time.monotonic()
    try:
        while chaos.kills.total() < flags.kills:
            for path in folder.glob("out*"):
                if path.is_file():
                    path.unlink()
            chaos.run(command(folder / "input", folder / "out", "--engine", "ray"), folder / "log", flags.kills)
            assert digests(folder / "out") == expected, f"other bytes after {dict(chaos.kills)}"
            assert not (folder / "out.parts").exists()
            runs += 1
            print(f"{runs} runs, {dict(chaos.kills)}, {time.monotonic() - started:.0f} s", flush=True)
    finally:
        chaos.stop()
    seconds = round(time.monotonic() - started)
    result = {"kills": dict(chaos.kills), "runs": runs, "seconds": seconds, "equal": True, "ray": ray.__version__}
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
