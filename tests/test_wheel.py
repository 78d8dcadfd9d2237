"""The sdist and the wheel are complete, and the commands and the drop-in work from the installed wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from megatron_core.commands.start import modules

for package in ("build", "scikit_build_core"):
    pytest.importorskip(package, reason=f"{package} is not installed (make install-test)")

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]

PROGRAM = """
import importlib.metadata
import megatron_core.drop_in
import deepspeed
from deepspeed.key_table import known_keys
from megatron.core.transformer import TransformerConfig
print(importlib.metadata.version("deepspeed"), deepspeed.__version__, len(known_keys()) > 100, deepspeed.__file__)
"""


def _tracked(folder: str = "megatron_core") -> set[str]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git work tree")
def test_no_file_of_the_package_is_left_out_of_wheels() -> None:
    files = _tracked()
    assert "megatron_core/drop_in/deepspeed/keys.yaml" in files
    assert "megatron_core/drop_in/deepspeed-0.19.8.egg-info/PKG-INFO" in files
    # scikit-build-core leaves out what git ignores, and every folder *.dist-info.
    call = ["git", "check-ignore", "--no-index", "--stdin"]
    ignored = subprocess.run(call, cwd=ROOT, input="\n".join(files), capture_output=True, text=True, check=False)
    assert ignored.stdout == ""
    assert not [name for name in files if ".dist-info/" in name]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this source, and the wheel that is built from the sdist, without native libraries."""
    folder = tmp_path_factory.mktemp("dist")
    call = [sys.executable, "-m", "build", "--no-isolation", "--config-setting=wheel.cmake=false"]
    done = subprocess.run([*call, f"--outdir={folder}", str(ROOT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the installed wheel, and of this one only the other packages."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)], check=True)
    # A folder in a .pth file is searched, but its own .pth files, such as that of the editable install, are not read.
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    return folder / "bin"


def run(program: Path, *words: object, cwd: Path) -> str:
    """The standard output of an installed program that must succeed, outside of this repository."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": f"{program.parent}{os.pathsep}{environment['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [program, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{program.name} {words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_and_the_sdist_are_complete(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name.startswith("megatron_native-") and "-py3-none-" in wheel.name
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"megatron_native-{version}.tar.gz" == sdist.name
    assert re.search(rf"^## {re.escape(version)} ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert _tracked() <= names
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _tracked() | _tracked("csrc") | {"pyproject.toml", "README.md", "LICENSE"} <= names
    if importlib.util.find_spec("twine"):
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)


@pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
@pytest.mark.parametrize(("words", "switch"), [([], "ON"), (["CUDA=1"], "ON"), (["CUDA=0"], "OFF")])
def test_make_wheel_says_what_it_builds(words: list[str], switch: str) -> None:
    """``make --dry-run`` prints the commands without running them."""
    call = ["make", "--dry-run", "wheel", *words]
    commands = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"--config-settings cmake.define.MEGATRON_CUDA={switch} " in commands
    assert ("with the CUDA library if there is nvcc" in commands) == (switch == "ON")
    assert "Processor time" in commands and "--quiet" not in commands.split("pip wheel")[1].split("\n")[0]


@pytest.mark.skipif(not shutil.which("cmake") or not shutil.which("c++"), reason="there is no cmake or no compiler")
@pytest.mark.parametrize("switch", ["ON", "OFF"])
def test_cuda_can_be_left_out_of_the_build(switch: str, tmp_path: Path) -> None:
    """With a program in place of nvcc that reports that it was called."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ntouch {tmp_path}/called\nexit 1\n")
    nvcc.chmod(0o755)
    call = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(tmp_path / "build"), f"-DMEGATRON_CUDA={switch}"]
    environment = os.environ | {"CUDACXX": str(nvcc)}
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("No CUDA library: MEGATRON_CUDA=OFF" in done.stdout) == (switch == "OFF")
    assert (tmp_path / "called").exists() == (switch == "ON")
    assert "CPU libraries: " in done.stdout


def test_the_drop_in_works_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "python", "-c", PROGRAM, cwd=tmp_path)
    assert said.startswith("0.19.8 0.19.8 True ") and str(installed.parent) in said


@pytest.mark.whole_matrix
def test_text_is_trained_on_two_ranks_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    """From text to a trained model that generates, by the installed commands alone."""
    assert str(installed.parent) in run(
        installed / "python", "-c", "import megatron_core; print(megatron_core.__file__)", cwd=tmp_path
    )
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    (tmp_path / "text" / "b.txt").write_text("pack my box with five dozen jugs\n" * 200)
    tokenizer = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tokenizer.json")
    model = (*("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--seq-length", 16), *tokenizer)
    steps = ("--train-iters", 4, "--micro-batch-size", 2, "--global-batch-size", 4, "--lr", 1e-3, "--eval-iters", 0)
    for name, *words in (
        ("collect-corpus", "--folder", "text", "--output", "corpus.jsonl"),
        ("tokenizer", "--input", "corpus.jsonl", "--vocab-size", 300, "--output", "tokenizer.json"),
        (
            "preprocess",
            "--input",
            "corpus.jsonl",
            "--output-prefix",
            "corpus",
            *tokenizer,
            "--append-eod",
            "--workers",
            1,
        ),
        ("train", "--nproc-per-node", 2, *model, *steps, "--data-path", "corpus_text_document", "--save", "run"),
        ("report", "run", "--out", "report.html"),
    ):
        run(installed / f"megatron-{name}", *words, cwd=tmp_path)
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    text = run(installed / "megatron-generate", "--load", "run", "--prompt", "the", "--max-new-tokens", 2, cwd=tmp_path)
    assert text.startswith("the")


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", modules())
def test_each_command_explains_itself(name: str, installed: Path, tmp_path: Path) -> None:
    shown = run(installed / name, "--help", cwd=tmp_path)
    assert f"usage: {name}" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
