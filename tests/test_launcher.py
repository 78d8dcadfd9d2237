"""Ranks of srun and mpirun."""

from __future__ import annotations

import pytest

from megatron_core.launcher import read_launcher
from tests.programs import run_ranks_of

MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "node[007-008,020],other3",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "5",
}


def test_ranks_of_slurm() -> None:
    found = dict(SLURM)
    read_launcher(found)
    assert {name: value for name, value in found.items() if "SLURM" not in name} == {
        "RANK": "9",
        "WORLD_SIZE": "11",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "node007",
        "MASTER_PORT": str(15_000 + 7 * 1234 + 5),
    }


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[1-3]", "a1"),
        ("a[09,11]b,c", "a09b"),
        ("a-1,a-2", "a-1"),
        ("r[1-2]n[3-4],b", "r1n3"),
    ],
)
def test_first_host_of_slurm(hosts: str, first: str) -> None:
    found = SLURM | {"SLURM_STEP_NODELIST": hosts}
    read_launcher(found)
    assert found["MASTER_ADDR"] == first


def test_ranks_of_mpi() -> None:
    found = dict(MPI)
    read_launcher(found)
    given = [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert given == ["1", "2", "1", "2"]
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("127.0.0.1", "29500")


def test_ranks_of_mpi_in_a_job_of_slurm() -> None:
    """They inherit the variables of the task of srun that started them."""
    found = MPI | SLURM
    read_launcher(found)
    assert [found[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["1", "2", "1"]


def test_what_is_given_has_precedence() -> None:
    found = MPI | {"MASTER_ADDR": "first", "MASTER_PORT": "1024"}
    read_launcher(found)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"], found["RANK"]) == ("first", "1024", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # torchrun
        given = MPI | SLURM | {name: "0"}
        found = dict(given)
        read_launcher(found)
        assert found == given


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell, or one torchrun for each machine
        {name: value for name, value in SLURM.items() if "STEP" not in name},  # a batch script outside of srun
        MPI | {"OMPI_COMM_WORLD_SIZE": "x"},
    ],
)
def test_one_process(environment: dict[str, str]) -> None:
    found = dict(environment)
    read_launcher(found)
    assert found == environment


def test_ranks_of_mpi_on_several_machines_need_an_address() -> None:
    found = MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    read_launcher(found)
    assert "MASTER_ADDR" not in found


def test_ranks_without_torchrun_train_one_model() -> None:
    """Each was a job of its own before, and all wrote the same checkpoint."""
    flags = "--mock-data --vocab-size 64 --train-iters 1 --num-layers 2 --hidden-size 32 --num-attention-heads 2 "
    flags += "--seq-length 16 --eval-iters 0 --tensor-model-parallel-size 2"
    done = run_ranks_of(f"mpirun --nproc-per-node 2 pretrain_gpt.py {flags}")
    assert done.returncode == 0, done.stderr
    assert "layout tp2 on 2 ranks" in done.stdout and "2 ranks, started by mpirun" in done.stderr
