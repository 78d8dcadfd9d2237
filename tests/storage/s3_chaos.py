"""Disturbs trainings with data, checkpoints and metrics in an S3 server; compares them with an undisturbed one.

python -m tests.storage.s3_chaos --faults 200 --out runs/s3_chaos.json

The server is moto's, behind a proxy that throttles, answers 500, 503 and expired credentials, truncates bodies, resets
connections before and after the server has acted, repeats earlier listings, and waits. A run that fails is started
again by the same command on the same machine. After each attempt the newest complete checkpoint
must be intact and not older than before; each failure must be one sentence with its cause; the final tensors and the
loss of each step must be those of the undisturbed run, bit for bit.
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
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_core.locations import CACHE_VARIABLE
from megatron_core.storage.block_cache import SIZE_VARIABLE
from tests.datasets.files import write
from tests.programs import ForkedPopen, free_port
from tests.storage.server import BUCKET, s3_server, wait_for_server

ROOT = Path(__file__).parents[2]
STEPS = 6
TRAINING = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"),
    *("--vocab-size", "64", "--micro-batch-size", "2", "--global-batch-size", "4", "--eval-iters", "0", "--fp64"),
    *("--lr", "1e-2", "--lr-decay-style", "constant", "--train-iters", str(STEPS), "--log-interval", "1"),
]
CAUSES = {
    "throttled": "SlowDown|reduce your request rate|503|Service Unavailable",
    "unavailable": "ServiceUnavailable|Service is unable|503|Service Unavailable",
    "internal": "InternalError|internal error|500|Internal Server Error",
    "expired": "expired",
    "reset": "[Cc]onnect|reset|closed|[Dd]isconnect",
    "truncated": "truncated|[Ii]ncomplete|payload|[Cc]onnect|closed|bytes",
    "stale": "no such object|does not exist|not found",
    "slow": "[Tt]imeout|timed out",
}
"""Words in the message of a failure, by the kind of fault."""


@contextmanager
def disturbed_server(folder: Path, seed: int) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Environment variables for clients of the server behind the proxy, and of the server itself."""
    with s3_server() as (_, direct):
        port = free_port()
        server_port = direct["AWS_ENDPOINT_URL"].rpartition(":")[2]
        words = ["-m", "tests.storage.faulty_proxy", str(port), server_port, str(folder), str(seed)]
        proxy = subprocess.Popen([sys.executable, *words], cwd=ROOT)
        address = f"http://127.0.0.1:{port}"
        try:
            (folder / "calm").touch()
            wait_for_server(address, proxy)
            # Two attempts of each request, so that a series of faults is rarely repeated for minutes.
            yield direct | {"AWS_ENDPOINT_URL": address, "AWS_MAX_ATTEMPTS": "2"}, direct
        finally:
            proxy.kill()
            proxy.wait()


def run(words: list[str], environment: dict[str, str], seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """A program in a fork of this process."""
    settings = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *words]
    with ForkedPopen(
        command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, errors = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def state_of(save: str, environment: dict[str, str]) -> dict[str, object]:
    """The newest checkpoint, with the hashes of its tensors, and the losses of the metrics file."""
    done = run(["-m", "tests.storage.s3_chaos", "--state", save], environment)
    assert done.returncode == 0, done.stderr
    state: dict[str, object] = json.loads(done.stdout)
    return state


def print_state(save: str) -> None:
    """Print the state of a folder or URL; an AssertionError if its newest checkpoint is damaged."""
    from megatron_core.checkpoint import CheckpointReader, find_checkpoint
    from megatron_core.locations import location
    from megatron_core.reports.tensor_hashes import checkpoint_hashes

    newest = find_checkpoint(save)
    state: dict[str, object] = {"iteration": 0}
    if newest is not None:
        with CheckpointReader(newest) as reader:
            assert not reader.verify(), newest
            state = {"iteration": reader.manifest.iteration, "hashes": checkpoint_hashes(reader)}
    metrics = location(save) / "metrics.jsonl"
    records = map(json.loads, metrics.read_text().splitlines()) if metrics.exists() else iter(())
    state["losses"] = {str(r["iteration"]): r["loss"] for r in records if r["kind"] == "step"}
    print(json.dumps(state))


def check_messages(done: subprocess.CompletedProcess[str], kinds: set[str]) -> list[str]:
    """The messages about failures; AssertionError if one does not name a cause, or if there is none."""
    text = done.stdout + done.stderr
    assert "Traceback" not in text, text
    messages = [
        line for line in text.splitlines() if re.search(r"^error: |saving failed|files of the run are in", line)
    ]
    causes = "|".join(CAUSES[kind.removesuffix(" after")] for kind in kinds)
    for message in messages:
        assert re.search(causes, message), f"{kinds}: {message}"
    assert messages or not done.returncode, text
    return messages


class Chaos:
    """Runs trainings until there were enough faults."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self.faults: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()

    def train(self, number: int, expected: dict[str, object], data: str, clients: tuple[dict, dict], most: int) -> None:
        """One training; it is calm when there were `most` faults."""
        disturbed, direct = clients
        save = f"s3://{BUCKET}/run{number}"
        before = 0
        asynchronous = ["--async-save"] if number % 2 else []
        words = ["-m", "megatron_core.commands.train", *TRAINING, "--data-path", data, "--save", save, "--load", save]
        words += ["--save-interval", "1", "--keep-last", "2", *asynchronous]
        cache = self._folder / f"cache{number}"
        for attempt in range(100):
            (self._folder / "faults").write_text("")
            # Otherwise most attempts would end at the start.
            (self._folder / "quiet").write_text(str(self._random.randrange(150)))
            if self.faults.total() < most and attempt < 30:
                (self._folder / "calm").unlink(missing_ok=True)
            limit = {SIZE_VARIABLE: "2M"} if self._random.random() < 0.5 else {}
            done = run(words, disturbed | {CACHE_VARIABLE: str(cache)} | limit)
            (self._folder / "calm").touch()
            kinds = Counter(line.split("\t")[0] for line in (self._folder / "faults").read_text().splitlines())
            self.faults += kinds
            for message in check_messages(done, set(kinds)):
                self.messages[re.sub(r"[\d.]+|s3://\S*", "N", message)[:160]] += 1
            self.attempts["failed" if done.returncode else "complete"] += 1
            state = state_of(save, direct | {CACHE_VARIABLE: str(self._folder / "check")})
            iteration = state["iteration"]
            assert isinstance(iteration, int) and iteration >= before, f"{save}: {before} was complete, now {iteration}"
            before = iteration
            if not done.returncode:
                assert state == expected, (save, state["iteration"], state["losses"], expected["losses"])
                return
            for path in cache.glob("*"):  # tokens are read again
                if path.name != "runs":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise AssertionError(f"{save}: no end after 100 attempts:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def disturb(folder: Path, faults: int, seed: int) -> dict[str, object]:
    """Disturb trainings by a number of faults; the figures."""
    began = time.monotonic()
    corpus = write(folder / "corpus", [[n % 63 + 1 for n in range(k, k + 60)] for k in range(40)])
    alone = ["-m", "megatron_core.commands.train", *TRAINING, "--data-path", corpus, "--save", str(folder / "alone")]
    done = run(alone, {})
    assert done.returncode == 0, done.stderr
    expected = state_of(str(folder / "alone"), {})
    chaos = Chaos(folder, seed)
    runs = 0
    with disturbed_server(folder, seed) as clients:
        data = f"s3://{BUCKET}/data/corpus"
        for suffix in (".bin", ".idx"):
            upload = "import sys, s3fs; s3fs.S3FileSystem().put(*sys.argv[1:])"
            words = [sys.executable, "-c", upload, f"{corpus}{suffix}", f"{data}{suffix}"]
            subprocess.run(words, env=os.environ | clients[1], check=True)
        while chaos.faults.total() < faults:
            chaos.train(runs, expected, data, clients, faults)
            runs += 1
            print(f"{runs} runs, {dict(chaos.faults)}, {time.monotonic() - began:.0f} s", flush=True)
    return {
        "faults": dict(chaos.faults),
        "runs": runs,
        "attempts": dict(chaos.attempts),
        "messages": dict(chaos.messages.most_common()),
        "seconds": round(time.monotonic() - began),
        "equal": True,
    }


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/s3_chaos.json"))
    parser.add_argument("--state", help="print the state of a folder of checkpoints; for this program itself")
    flags = parser.parse_args()
    if flags.state:
        print_state(flags.state)
        return
    folder = Path(tempfile.mkdtemp(prefix="s3_chaos_"))
    result = disturb(folder, flags.faults, flags.seed)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(result, indent=2) + "\n")
    print(flags.out.read_text())
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
