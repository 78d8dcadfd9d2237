"""Every example can be started as documented: command lines are dry-run, job files are parsed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_core.preprocess import PreprocessSettings
from megatron_core.preprocess.settings import check_preprocessing
from megatron_core.reports.dry_run import RankEstimate
from megatron_core.terminal import parse_flags
from megatron_core.training import read_settings

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
JOBS = ("kubernetes", "preprocess_array", "preprocess_join", "jobset", "trainjob", "skypilot")
CONFIGURATIONS = sorted(path.stem for path in EXAMPLES.glob("*.yaml") if path.stem not in JOBS)
PARAMETERS = {
    "gpt3_175b": 174_604_259_328,
    "llama3_8b": 8_030_261_248,
    # The published model and its multi-token prediction layer: norms and a projection around one more layer.
    "deepseek_v3": 671_026_419_200 + 11_610_068_224,
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _dry_run(words: list[str], world: int | None = None) -> tuple[RankEstimate, int]:
    """The last rank, and the number of ranks, of the job that ``torchrun`` would start with these arguments.

    ``world``: the number of ranks, if another launcher starts them.
    """
    at = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    launcher = " ".join(words[:at])
    nodes, ranks = (int(found[1]) if (found := re.search(rf"--{name}[ =](\d+)", launcher)) else 1 for name in _SIZES)
    world = nodes * ranks if world is None else world
    config, dry = read_settings("pretrain_gpt.py", [*words[at + 1 :], "--dry-run", "--world-size", str(world)])
    assert dry.world_size == world
    return RankEstimate.of(config, world, world - 1), world


_SIZES = ("nnodes", "nproc-per-node")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_command_on_the_first_lines_runs(name: str) -> None:
    text = (EXAMPLES / f"{name}.yaml").read_text()
    comments = "\n".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#"))
    command = re.search(r"^torchrun .*(?:(?<=\\)\n.*)*", comments, re.MULTILINE)
    assert command is not None
    found, world = _dry_run(shlex.split(command[0].replace("\\\n", " ")))
    assert found.model_parameters == PARAMETERS.get(name, found.model_parameters)
    assert sum(found.bytes_by_kind.values()) < 80e9
    said = re.search(r"--dry-run --world-size (\d+)", comments)
    assert said is None or int(said[1]) == world


def _commands(script: str, *arguments: str, folder: Path, **environment: str) -> list[list[str]]:
    """The programs started by a script, replaced by one that records its arguments."""
    note = folder / "commands"
    for name in ("python", "torchrun", "srun"):
        stub = folder / name
        stub.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"open({str(note)!r}, 'a').write(json.dumps([{name!r}, *sys.argv[1:]]) + '\\n')\n"
        )
        stub.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    script_path = str(EXAMPLES / script)
    subprocess.run(["bash", script_path, *arguments], check=True, env={**os.environ, **environment, "PATH": path})
    return [json.loads(line) for line in note.read_text().splitlines()]


def test_continue_from_a_model_of_hugging_face(tmp_path: Path) -> None:
    from tests.hub.hf_models import save_model

    save_model("llama", tmp_path / "model")
    model, result = str(tmp_path / "model"), str(tmp_path / "result")
    prepare, train, convert = _commands("continue_from_hugging_face.sh", model, "corpus.jsonl", result, folder=tmp_path)
    found, world = _dry_run(train)
    assert found.config.checkpoint.load_hf == model and world == 8
    assert found.config.data.data_path == (f"{result}/corpus_text_document",)
    for tool, *words in (prepare[1:], convert[1:]):
        known = subprocess.run([sys.executable, tool, "--help"], check=True, capture_output=True, text=True).stdout
        assert [word for word in words if word.startswith("--") and word not in known] == []


def test_slurm(tmp_path: Path) -> None:
    """srun starts the ranks, and a requeued job loads its last checkpoint."""
    environment = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "12"}
    words = ["--config", "examples/gpt_1b.yaml", "--mock-data", "--vocab-size", "1000", "--save", "checkpoints"]
    (command,) = _commands("slurm.sh", *words, folder=tmp_path, **environment)
    assert command[:3] == ["srun", "--kill-on-bad-exit=1", "python"]
    text = (EXAMPLES / "slurm.sh").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    found, _ = _dry_run(command, 2 * int(options["ntasks-per-node"]))
    assert found.config.checkpoint.save == found.config.checkpoint.load == "checkpoints"
    (tmp_path / "commands").unlink()
    (command,) = _commands("slurm.sh", *words[:-2], folder=tmp_path, **environment)
    assert "--load" not in command


def test_kubernetes() -> None:
    """As many pods as nodes, which connect to the first one by its name in the service."""
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["clusterIP"] == "None"
    flags = dict(word.removeprefix("--").split("=", 1) for word in container["command"] if "=" in word)
    assert flags["master-addr"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(flags["master-port"]) == service["spec"]["ports"][0]["port"]
    assert int(flags["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(flags["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    found, world = _dry_run(container["command"])
    assert world == 16
    assert found.config.checkpoint.save == found.config.checkpoint.load


def test_preprocessing_in_an_array_of_kubernetes() -> None:
    """Every partition has a pod, and the join has the same flags."""
    array, join = (yaml.safe_load((EXAMPLES / f"preprocess_{name}.yaml").read_text()) for name in ("array", "join"))
    total = array["spec"]["completions"]
    assert array["spec"]["completionMode"] == "Indexed"
    commands = []
    for job in (array, join):
        pod = job["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        shell = container["command"]
        shell[-1] = shell[-1].replace("exec megatron-preprocess", "echo")
        for index in range(total if job is array else 1):
            environment = os.environ | {"JOB_COMPLETION_INDEX": str(index)}
            words = subprocess.run(shell, env=environment, check=True, capture_output=True, text=True).stdout.split()
            commands.append(parse_flags(PreprocessSettings, args=words, description=""))
    *parts, joined = commands
    assert [part.share for part in parts] == [(number, total) for number in range(1, total + 1)]
    assert joined.join_partitions
    same = {"partition": None, "join_partitions": False}
    assert {replace(settings, **same) for settings in commands} == {replace(joined, **same)}
    for settings in commands:
        check_preprocessing(settings)
