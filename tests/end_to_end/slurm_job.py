"""A real Slurm on this machine: jobs of `examples/slurm.sh` that are requeued and preempted end bit-identical.

apt-get install slurm-wlm munge
python -m tests.end_to_end.slurm_job --out runs/slurm.json

Needs root: starts munged unless it runs, a controller and two nodes, which are addresses of this machine. A job of two
nodes trains undisturbed; another one is requeued twice with `scontrol requeue`, then preempted by SIGTERM, after which
it must be COMPLETED, and submitted again. Every attempt must resume from the newest checkpoint, and the last one must
have its tensors bit for bit. A job whose training fails must be FAILED.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_core.checkpoint import CheckpointReader, find_checkpoint
from megatron_core.checkpoint.folder import TRACKER
from megatron_core.reports.tensor_hashes import checkpoint_hashes

ROOT = Path(__file__).parents[2]
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/node-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/node-%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=60
NodeName=127.0.0.[1-2] NodeAddr=127.0.0.1 NodeHostname=localhost Port=[17001-17002] CPUs=2 State=UNKNOWN
PartitionName=p Nodes=127.0.0.[1-2] Default=YES MaxTime=INFINITE State=UP
"""
STEPS = 150
TRAINING = [
    *("--mock-data", "--vocab-size", "64", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", str(STEPS)),
    *("--lr", "1e-2", "--eval-iters", "0", "--save-interval", "20", "--log-interval", "1", "--fp64"),
]
RESUMED = re.compile(r"resuming from iteration (\d+)")


def run(*words: str, **options: object) -> str:
    """The output of a program."""
    return subprocess.run(words, check=True, capture_output=True, text=True, **options).stdout.strip()


def leave_out_without(program: str, package: str) -> None:
    """End this program with a message if another one is not installed."""
    if shutil.which(program) is None:
        print(f"left out: there is no {program} on this machine; apt-get install {package}")
        sys.exit(0)


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Slurm's daemons."""
    configuration = folder / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(folder=folder))
    os.environ["SLURM_CONF"] = str(configuration)
    (folder / "state").mkdir()
    for number in (1, 2):
        (folder / f"spool-127.0.0.{number}").mkdir()
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        run("su", "-s", "/bin/sh", "munge", "-c", "/usr/sbin/munged")
    try:
        run("slurmctld")
        for number in (1, 2):
            run("slurmd", "-N", f"127.0.0.{number}")
        wait_for(lambda: "idle" in run("sinfo", "--noheader", "--format=%t"), "idle nodes")
        yield
    finally:
        for path in sorted(folder.glob("*.pid"), reverse=True):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)


def wait_for(condition: Callable[[], bool], name: str, seconds: float = 300) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"no {name} after {seconds:.0f} s")
        time.sleep(0.2)


def saved_iteration(folder: Path) -> int:
    """Iteration of the newest complete checkpoint, which a save writes last; 0 without one."""
    tracker = folder / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0


def hashes(folder: Path) -> dict[str, str]:
    """The hash of each tensor of the newest checkpoint."""
    with CheckpointReader(find_checkpoint(str(folder))) as reader:
        return checkpoint_hashes(reader)


class Job:
    """A training of two nodes with one rank each."""

    def __init__(self, folder: Path) -> None:
        self.save = folder / "checkpoints"
        self.log = folder / "log"
        folder.mkdir()
        self._folder = folder

    def submit(self, *flags: str) -> None:
        """Submit the example's script; options of the command line replace those of the script."""
        options = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1"]
        options += [f"--output={self.log}", "--parsable"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment["PATH"] = f"{ROOT / '.venv' / 'bin'}:{environment['PATH']}"
        words = ["sbatch", *options, "examples/slurm.sh", *TRAINING, "--save", str(self.save), *flags]
        self.number = run(*words, cwd=ROOT, env=environment)

    @property
    def state(self) -> str:
        """Slurm's state of the job."""
        found = re.search(r"JobState=(\w+)", run("scontrol", "show", "job", self.number))
        return found[1] if found else ""

    @property
    def saved(self) -> int:
        """Iteration of the newest checkpoint; 0 without one."""
        return saved_iteration(self.save)

    def wait_for_save(self, iteration: int) -> None:
        """Wait until a checkpoint of an iteration exists."""
        wait_for(lambda: self.saved >= iteration or self.state in ("FAILED", "COMPLETED"), f"checkpoint {iteration}")

    def wait_for_end(self, state: str = "COMPLETED") -> None:
        """Wait until the job has ended in a state."""
        wait_for(lambda: self.state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), "end of the job")
        assert self.state == state, f"the job is {self.state}:\n{self.log.read_text()[-6000:]}"


def main() -> None:
    """Parse the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/slurm.json"))
    flags = parser.parse_args()
    leave_out_without("slurmctld", "slurm-wlm munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm_"))
    with cluster(folder):
        reference = Job(folder / "undisturbed")
        reference.submit()
        reference.wait_for_end()
        job = Job(folder / "disturbed")
        job.submit()
        saved = []
        for iteration in (20, 60):
            job.wait_for_save(iteration)
            run("scontrol", "requeue", job.number)
            wait_for(lambda: job.state == "PENDING", "requeued job")
            saved.append(job.saved)
            wait_for(lambda: job.state == "RUNNING", "restarted job")
        job.wait_for_save(saved[-1] + 1)
        run("scancel", "--signal=TERM", job.number)
        job.wait_for_end()  # the ranks have saved, and end with status 0
        saved.append(job.saved)
        assert job.saved < STEPS, "the job was complete before it was preempted"
        job.submit()
        job.wait_for_end()
        resumed = [int(number) for number in RESUMED.findall(job.log.read_text())]
        equal = hashes(job.save) == hashes(reference.save)
        failing = Job(folder / "failing")
        failing.submit("--num-attention-heads", "5")
        failing.wait_for_end("FAILED")
    result = {"saved before each restart": saved, "resumed from": resumed, "equal": equal}
    print(json.dumps(result))
    assert equal and resumed == saved and job.saved == STEPS, job.log.read_text()[-6000:]
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    flags.out.write_text(json.dumps(result, indent=2) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
