"""Jobs under torchrun whose ranks are killed and restarted, and whose nodes leave and join, with real processes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_core.config.validate import largest_world_size, problems
from megatron_core.parallel.launch import _select_attempt
from megatron_core.parallel.world import World
from megatron_core.training.pretrain import notes
from tests.checkpoint.runs import SMALL, compare, start, stored, train
from tests.defects.plant import planted
from tests.end_to_end.test_failures import ROOT, ranks_without_launcher
from tests.memory import needs_proc
from tests.programs import free_port
from tests.runs import tiny_config

JOB = SMALL | {
    "num_layers": 1,
    "eval_iters": 0,
    "lr_decay_style": "constant",
    "lr": 1e-4,
}

# Otherwise a node that joins a running job never gets the address of the store (torch 2.13; why the two share it:
# https://github.com/pytorch/pytorch/issues/135712).
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
IN_MEMORY = {"non_persistent_save_interval": 1, "non_persistent_ckpt_type": "local", "replication": True}


def flags(settings: dict[str, object]) -> list[str]:
    """The settings as flags."""
    found: list[str] = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        found += [flag] if value is True else [flag, str(value)]
    return found


class Node:
    """A launcher with its ranks, and its output."""

    def __init__(self, log: Path, launcher: Sequence[str], folder: Path, settings: dict[str, object]) -> None:
        self.log = log
        both = {"save": str(folder), "load": str(folder)}
        command = [*launcher, "pretrain_gpt.py", *flags(JOB | both | settings)]
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT
            )

    def wait_until_it_trains(self, *, alone: bool) -> None:
        """Wait until the latest attempt has run some steps, on this node or another."""

        def trains() -> bool:
            banner, _, steps = self.log.read_text().rpartition(" parameters on rank 0")
            with_others = "on 2 ranks, and 1 spare" in banner.rpartition("\n")[2]
            return bool(banner) and with_others != alone and len(re.findall(r"iteration +\d+/", steps)) > 2

        deadline = time.monotonic() + 300
        while not trains():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        found, left = [], [self.process.pid]
        while left:
            pid = left.pop()
            with suppress(FileNotFoundError):
                left += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"pretrain_gpt.py" in command and b"torch.distributed.run" not in command:
                    found.append(pid)
        return found

    def end(self) -> None:
        """Kill it with its ranks, in any state."""
        if self.process.poll() is None:
            ranks = self.ranks()
            self.process.kill()
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            self.process.wait()


def torchrun(*arguments: str) -> list[str]:
    """The command of a launcher."""
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def undisturbed(folder: Path, tolerance: float) -> int:
    """Assert that the newest checkpoint in ``folder`` equals that of one process after as many steps; returns the
    number."""
    steps = int((folder / "latest_checkpointed_iteration.txt").read_text())
    run = start(JOB | {"train_iters": 10**6})
    train(run, steps)
    compare(run, stored(folder / f"iter_{steps:07d}"), tolerance)
    return steps


# In make test the page docs/debug.md is run, whose command lets torchrun restart a job in the same way.
@pytest.mark.whole_matrix
def test_torchrun_restarts_a_job_whose_rank_was_killed(tmp_path: Path) -> None:  # C57
    """torchrun's store outlives the ranks: keys of the first attempt must not affect the second."""
    settings = {"train_iters": 6, "save_interval": 2, "inject_fault": "kill@1:4"}
    node = Node(
        tmp_path / "log",
        torchrun("--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
        tmp_path / "run",
        settings | {"tensor_model_parallel_size": 2},
    )
    try:
        assert node.process.wait(timeout=300) == 0, node.log.read_text()
    finally:
        node.end()
    output = node.log.read_text()
    assert "injected fault: kill in step 4" in output
    assert (
        "resuming from iteration 2" in output
        and "collectives: shared memory" in output[output.index("resuming") - 400 :]
    )
    assert undisturbed(tmp_path / "run", 1e-9) == 6


def _meet_again_and_again(seconds: float) -> int:
    """The number of distinct names of four attempts on one store. The second rank of each arrives first and finds keys
    of the previous attempt; before the third attempt, one has failed because not all of its ranks joined."""
    store, names = dist.HashStore(), set()
    store.set_timeout(timedelta(seconds=seconds))
    for attempt in range(4):
        with ThreadPoolExecutor() as pool:
            world = [World(rank, 2, 0, torch.device("cpu")) for rank in range(2)]
            other = pool.submit(_select_attempt, store, world[1], seconds)
            time.sleep(0.1)
            if attempt == 2:
                store.set("attempt", "failed")
                time.sleep(0.1)
            stores = [_select_attempt(store, world[0], seconds), other.result()]
        assert not stores[1].check(["key"]), "left by another attempt"
        stores[0].set("key", str(attempt))
        assert stores[1].get("key") == str(attempt).encode()
        names.add(store.get("attempt"))
    return len(names)


def test_ranks_of_an_attempt_meet_whatever_earlier_ones_have_left() -> None:
    assert _meet_again_and_again(20.0) == 4
    fragment = ' and word in store.get(f"{name}/all").decode()'
    with planted("parallel.launch:_select_attempt", fragment, ""), pytest.raises((AssertionError, TimeoutError)):
        _meet_again_and_again(0.5)


def test_a_rank_that_does_not_come_is_named() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="rank 1 did not join"):
        _select_attempt(store, World(0, 2, 0, torch.device("cpu"), spares=1), 0.2)


@pytest.mark.parametrize(("fault", "statuses"), [([], [0, 0, 0]), (["exception@1:2"], [75, 1, 75])])
def test_spare_ranks_end_with_the_others(fault: list[str], statuses: list[int], tmp_path: Path) -> None:
    """A batch of 4 micro-batches cannot be split over 3 ranks. The launcher does not end the waiting one."""
    folder = {"save": str(tmp_path / "run"), "load": str(tmp_path / "run")}
    logs = [tmp_path / str(rank) for rank in range(3)]
    with ranks_without_launcher(logs, **folder, train_iters=3, elastic=True, inject_fault=tuple(fault)) as ranks:
        for rank in ranks:
            rank.join(300)
        found = [rank.exitcode for rank in ranks]
    assert found == statuses, [log.read_text() for log in logs]
    assert "on 2 ranks, and 1 spare" in logs[0].read_text()


def test_an_elastic_run_has_the_bits_of_another_run(tmp_path: Path) -> None:
    states = []
    for name, settings in (("elastic", {"elastic": True}), ("fixed", {})):
        folder = tmp_path / name
        logs = [tmp_path / f"{name}{rank}" for rank in range(2)]
        with ranks_without_launcher(logs, save=str(folder), load=str(folder), train_iters=3, **settings) as ranks:
            for rank in ranks:
                rank.join(300)
            assert [rank.exitcode for rank in ranks] == [0, 0], [log.read_text() for log in logs]
        states.append(stored(folder / "iter_0000003"))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[1].items():
        torch.testing.assert_close(states[0][name], tensor, rtol=0.0, atol=0.0, msg=name)


@pytest.mark.whole_matrix
@needs_proc
def test_nodes_go_and_come(tmp_path: Path) -> None:  # C31
    """Of nodes with 1 and 2 ranks, 2 ranks train and one is spare, because a batch of 4 cannot be split over 3. The
    second node dies, the first continues alone, and the second joins again."""
    meeting = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    output = _go_and_come(tmp_path, lambda node: meeting, lambda node: [])
    assert "SIGTERM reached only rank 1" in output


def _go_and_come(
    tmp_path: Path,
    meeting: Callable[[int], list[str]],
    prefix: Callable[[int], list[str]],
    cable: Callable[[str], None] | None = None,
    *,
    memory: bool = False,
) -> str:
    """The output of the nodes. The second one is killed, or unreachable while its ``cable`` is down. With ``memory``
    they save every step in memory, not on disk, and the second one's memory is lost."""
    folder, nodes = tmp_path / "run", []
    settings: dict[str, object] = {"distributed_timeout_minutes": 0.3} if cable else {}
    settings |= {"train_iters": 10**6, "keep_last": 2, "log_interval": 1, "elastic": True}
    settings |= IN_MEMORY if memory else {"save_interval": 1}
    quick = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"

    def launch(number: int, attempt: str = "") -> Node:
        command = torchrun("--nnodes", "1:2", "--nproc-per-node", str(number), "--max-restarts", "3")
        command += ["--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-conf", f"{quick},is_host={2 - number}"]
        command += meeting(number)
        own = {"non_persistent_local_ckpt_dir": tmp_path / f"memory{number}"} if memory else {}
        nodes.append(Node(tmp_path / f"log{number}{attempt}", [*prefix(number), *command], folder, settings | own))
        return nodes[-1]

    try:
        first, second = launch(1), launch(2)
        first.wait_until_it_trains(alone=False)
        if cable:
            cable("down")
        else:
            second.process.send_signal(signal.SIGKILL)
        first.wait_until_it_trains(alone=True)
        if cable:
            second.end()
            cable("up")
        if memory:
            shutil.rmtree(tmp_path / "memory2")
        third = launch(2, "again")
        first.wait_until_it_trains(alone=False)
        for rank in first.ranks():
            os.kill(rank, signal.SIGUSR1)
        assert first.process.wait(timeout=300) == 0, first.log.read_text()
        assert third.process.wait(timeout=300) == 0, third.log.read_text()
    finally:
        for node in nodes:
            node.end()
    assert "Traceback" not in first.log.read_text() + third.log.read_text()
    assert undisturbed(folder, 1e-9) > 3
    return "".join(node.log.read_text() for node in nodes)


@contextmanager
def _two_hosts() -> Iterator[tuple[list[str], list[str], Callable[[str], None]]]:
    """Two network namespaces, their devices, and the cable between them, which may be up or down; their addresses are
    10.213.77.1 and .2."""
    names = [f"elastic{os.getpid()}{letter}" for letter in "ab"]
    ends = [f"el{os.getpid() % 10**6}{letter}" for letter in "ab"]

    def ip(*words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no network namespaces here: ip {' '.join(words)}: {done.stderr.strip()}")

    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("no network namespaces here: ip and unshare are not installed")
    with ExitStack() as cleanup:
        for name in names:
            ip("netns", "add", name)
            cleanup.callback(subprocess.run, ["ip", "netns", "delete", name])
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for number, (name, end) in enumerate(zip(names, ends, strict=True), 1):
            ip("-n", name, "address", "add", f"10.213.77.{number}/24", "dev", end)
            for device in ("lo", end):
                ip("-n", name, "link", "set", device, "up")
        yield names, ends, lambda state: ip("-n", names[1], "link", "set", ends[1], state)


@needs_proc
@pytest.mark.whole_matrix
@pytest.mark.parametrize("lost", ["killed", "out of reach"])
def test_hosts_go_and_come(lost: str, tmp_path: Path) -> None:
    """The same with separate hosts: separate networks, process namespaces, in which torchrun is process 1, and
    memories, which have all checkpoints saved before a signal."""
    with _two_hosts() as (names, devices, cable):

        def prefix(node: int) -> list[str]:
            own = ["ip", "netns", "exec", names[node - 1], "env", f"GLOO_SOCKET_IFNAME={devices[node - 1]}"]
            return [*own, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

        def meeting(node: int) -> list[str]:
            return ["--rdzv-endpoint", "10.213.77.1:29400", "--local-addr", f"10.213.77.{node}"]

        output = _go_and_come(tmp_path, meeting, prefix, cable if lost == "out of reach" else None, memory=True)
    assert "from the memory of 1 of 1 hosts" in output, "the first host has copies of what the second held"


@pytest.mark.parametrize(("shared", "told"), [("True", 1), ("False", 0)])
def test_a_store_that_later_nodes_do_not_find_is_told(shared: str, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    run = start(JOB | {"elastic": True, "save": "none", "load": "none", "train_iters": 1})
    assert sum("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note for note in notes(run)) == told


@pytest.mark.parametrize(
    ("settings", "most", "size"),
    [
        ({}, 8, 8),
        ({}, 7, 4),
        ({"global_batch_size": 12, "micro_batch_size": 1}, 7, 6),
        ({"tensor_model_parallel_size": 2}, 7, 4),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 7, 4),
        ({"tensor_model_parallel_size": 4}, 3, 3),
        ({"rampup_batch_size": (2, 2, 100), "global_batch_size": 12, "micro_batch_size": 1}, 9, 2),
    ],
)
def test_as_many_ranks_as_fit(settings: dict, most: int, size: int) -> None:
    config = tiny_config(**{"micro_batch_size": 1, "global_batch_size": 8} | settings)
    assert largest_world_size(config, most) == size
    assert bool(list(problems(config, size))) == (most == 3), "of none that fits, the faults are those of all ranks"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "give both the same folder"),
        ({"save": "a", "load": "b"}, "save=a and load=b"),
        ({"save": "a", "load": "a", "global_batch_size": None}, "add --global-batch-size"),
        ({"save": "a", "load": "a", "skip_train": True}, "skip_train"),
    ],
)
def test_settings_that_exclude_elastic_runs(settings: dict, words: str) -> None:
    (problem,) = [
        text for text in problems(tiny_config(elastic=True, **settings), 1) if text.startswith("elastic=True")
    ]
    assert words in problem
