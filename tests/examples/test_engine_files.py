"""Job files of Kubernetes, JobSet, Kubeflow Trainer and SkyPilot: their schemas, their numbers, and their commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from tests.examples.test_launch_files import _commands, _dry_run

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
KINDS = {
    ("v1", "Service"): models.IoK8sApiCoreV1Service,
    ("batch/v1", "Job"): models.IoK8sApiBatchV1Job,
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): models.TrainerV1alpha1TrainingRuntime,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
}
FILES = ("kubernetes", "preprocess_array", "preprocess_join", "jobset", "trainjob")


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of a file."""
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


def as_the_schema_reads(document: dict[str, Any]) -> dict[str, Any]:
    """The object after Kubeflow's Python interface has read it, which drops unknown keys and refuses wrong types."""
    return KINDS[document["apiVersion"], document["kind"]].from_dict(document).to_dict()


@pytest.mark.parametrize("name", FILES)
def test_the_schema_has_every_key(name: str) -> None:
    for document in documents(name):
        assert as_the_schema_reads(document) == document


def test_the_schema_finds_a_wrong_key_and_a_wrong_type() -> None:
    (document,) = documents("jobset")
    document["spec"]["failurePolicy"]["maxRestart"] = 20
    assert as_the_schema_reads(document) != document
    document["spec"]["failurePolicy"] = {"maxRestarts": "20"}
    with pytest.raises(ValueError, match="maxRestarts"):
        as_the_schema_reads(document)


def check_volumes(pod: dict[str, Any]) -> dict[str, Any]:
    """The container of a pod, which mounts all its volumes."""
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["restartPolicy"] == "Never"  # all pods start again together
    return container


def test_jobset() -> None:
    """As many pods as nodes, which connect to the first one by the name that JobSet gives it."""
    (document,) = documents("jobset")
    spec = document["spec"]
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0 and replicated["replicas"] == 1
    container = check_volumes(job["template"]["spec"])
    flags = dict(word.removeprefix("--").split("=", 1) for word in container["command"] if "=" in word)
    first = f"{document['metadata']['name']}-{replicated['name']}-0-0.{spec['network']['subdomain']}"
    assert flags["master-addr"] == first and spec["network"]["enableDNSHostnames"]
    assert int(flags["nnodes"]) == job["completions"] == job["parallelism"]
    assert int(flags["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    estimate, world = _dry_run(container["command"])
    assert world == 16
    assert estimate.config.checkpoint.save == estimate.config.checkpoint.load


def test_trainjob() -> None:
    """The job uses the runtime above it, whose replicated job and container have the names that Kubeflow changes."""
    runtime, train_job = documents("trainjob")
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].split("/")[0],
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert "torch" in runtime["spec"]["mlPolicy"]
    assert runtime["metadata"]["labels"]["trainer.kubeflow.org/framework"] == "torch"
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]
    assert template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    container = check_volumes(template["spec"]["template"]["spec"])
    trainer = train_job["spec"]["trainer"]
    assert (replicated["name"], container["name"], container["image"]) == ("node", "node", trainer["image"])
    assert trainer["numProcPerNode"] == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    launcher, *words = trainer["command"]
    sizes = [f"--nnodes={trainer['numNodes']}", f"--nproc-per-node={trainer['numProcPerNode']}"]
    estimate, world = _dry_run([launcher, *sizes, *words])
    assert world == 16
    assert estimate.config.checkpoint.save == estimate.config.checkpoint.load


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot(rank: int, tmp_path: Path) -> None:
    """The script of a machine, with SkyPilot's variables; the keys are checked by tests.end_to_end.engine_clients."""
    (task,) = documents("skypilot")
    script = tmp_path / "run.sh"
    script.write_text(task["run"])
    environment = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].split(":")[1],
        "BUCKET": "my-bucket",
    }
    (command,) = _commands(str(script), folder=tmp_path, **environment)
    flags = dict(zip(command[1::2], command[2::2], strict=False))
    assert (flags["--node-rank"], flags["--master-addr"]) == (str(rank), "10.0.0.7")
    estimate, world = _dry_run(command)
    assert world == 16
    assert estimate.config.checkpoint.save == estimate.config.checkpoint.load == "s3://my-bucket/checkpoints"


def test_slurm_in_a_container(tmp_path: Path) -> None:
    """The options of pyxis, and the same command as without it."""
    words = ("--config", "examples/gpt_1b.yaml", "--mock-data", "--vocab-size", "1000", "--save", "checkpoints")
    environment = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "12"}
    (plain,) = _commands("slurm.sh", *words, folder=tmp_path, **environment)
    (tmp_path / "commands").unlink()
    (contained,) = _commands("slurm.sh", *words, folder=tmp_path, IMAGE="./image.sqsh", **environment)
    options = [word for word in contained if word not in plain]
    mounted = os.getcwd()
    assert options == [
        "--container-image=./image.sqsh", f"--container-mounts={mounted}", f"--container-workdir={mounted}"
    ]  # fmt: skip
    assert [word for word in contained if word not in options] == plain
