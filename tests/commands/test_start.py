"""Commands: one module, one script and one entry point each; flags that every command has."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_core.commands import start as start_module
from megatron_core.commands.start import RANKED, command, command_name, modules, start
from tests.programs import run_ranks_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "megatron_core" / "commands"
ONLY_IN_A_CLONE = {"cuda_check", "list_flags"}


def test_each_command_is_a_script_and_an_entry_point() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(settings["project"]["scripts"]) == set(modules())
    assert set(settings["project"]["scripts"].values()) == {"megatron_core.commands.start:command"}
    scripts = {path.stem: path for path in (ROOT / "tools").glob("*.py") if path.stem not in ONLY_IN_A_CLONE}
    scripts["train"] = ROOT / "pretrain_gpt.py"
    assert scripts.keys() == set(modules().values())
    for name, path in scripts.items():
        code = [ast.unparse(node) for node in ast.parse(path.read_text()).body[1:]]
        assert code == [
            "from megatron_core.commands.start import start",
            f"if __name__ == '__main__':\n    start('{name}')",
        ]


@pytest.mark.parametrize("name", sorted(modules().values()))
def test_every_module_starts_itself_before_its_imports(name: str) -> None:
    found = [node for node in ast.parse((FOLDER / f"{name}.py").read_text()).body if not isinstance(node, ast.Expr)]
    found = [node for node in found if getattr(node, "module", None) != "__future__"]
    first = ast.unparse(found[0])
    others = ("run_ranked, start", "start, status_of", "start")
    assert first in {f"from megatron_core.commands.start import {names}" for names in others}
    assert ast.unparse(found[1]) == f"if __name__ == '__main__':\n    start('{name}')"
    assert "main" in {getattr(node, "name", None) for node in found}


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", *words]
    return subprocess.run(call, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_version_and_completion() -> None:
    done = run("megatron_core.commands.train", "--version")
    assert done.returncode == 0 and done.stdout.startswith("megatron-native 0.") and ", torch 2." in done.stdout
    done = run("megatron_core.commands.train", "--print-completion", "bash")
    assert done.returncode == 0 and "complete" in done.stdout
    assert "megatron-train" in done.stdout and "tensor-model-parallel-size" in done.stdout


@pytest.mark.every_case
def test_help_and_wrong_flags_of_every_command_do_not_load_torch() -> None:
    """Each command answers in a child of one process that has imported only what all commands start with."""
    program = """
import os, sys
from megatron_core.commands.start import modules, start
for module in modules().values():
    for flag, status in (("--help", 0), ("--no-such-flag", 2)):
        child = os.fork()
        if not child:
            sys.argv = [module, flag]
            try:
                start(module)
            except SystemExit as end:
                failed = isinstance(end.code, str) or bool(end.code)
                os._exit(2 if "torch" in sys.modules else int(failed != bool(status)))
            os._exit(3)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if ended:
            print(module, flag, {1: "status", 2: "loads torch", 3: "runs"}.get(ended, ended), file=sys.__stderr__)
"""
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    call = [sys.executable, "-c", program]
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=120)
    faults = [line for line in done.stderr.splitlines() if line.endswith(("status", "loads torch", "runs"))]
    assert not faults, faults


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("case", "status", "out", "error"),
    [
        ("sum", 0, ["rank 0 of 2: 3, 1 thread", "rank 1 of 2: 3, 1 thread"], ""),
        ("fails", 3, ["rank 0 saves"], "megatron-ranked: rank 1 ended with status 3"),
        ("refuses to end", 3, [], "megatron-ranked: rank 1 ended with status 3"),
        ("killed", 137, ["rank 0 saves"], "megatron-ranked: rank 1 was killed by SIGKILL"),
        ("asked to save", 0, ["rank 0 saves", "rank 1 saves"], ""),
        ("interrupted", 130, [], "megatron-ranked: rank "),
    ],
)
def test_ends_of_ranks(case: str, status: int, out: list[str], error: str) -> None:
    """The others end with the first that fails, all ranks get signals, and the status is that of the first failure."""
    done = run_ranks_of(f"python tests/commands/ranked.py 1 {case.replace(' ', '_')}", seconds=30)
    assert sorted(done.stdout.splitlines()) == out
    assert error in done.stderr and "Traceback" not in done.stderr
    assert done.returncode == status


def test_programs_of_ranks_start_no_gpu_when_they_are_imported() -> None:
    """CUDA cannot be used in a fork of a process that has asked for its devices."""
    names = ("is_available", "device_count", "current_device", "init")
    code = "import importlib, torch\ndef fail(*_): raise AssertionError('asks for a GPU')\n"
    code += "\n".join(f"torch.cuda.{name} = fail" for name in names)
    code += f"\nfor name in {sorted(RANKED)}: importlib.import_module(f'megatron_core.commands.{{name}}')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_two_ranks_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks get the other flags, in their order."""
    done = run("megatron_core.commands.train", "--seed", "7", "--nproc-per-node", "2", "--bogus", OMP_NUM_THREADS="1")
    assert done.returncode == 1 and "cannot be used on 2 ranks" in done.stderr and "--bogus" in done.stderr
    assert done.stderr.count("error: ") == 1, "printed once by the ranks"
    assert "Traceback" not in done.stderr and "megatron-train: rank " in done.stderr
    monkeypatch.setattr("sys.warnoptions", ["error::FutureWarning"])
    for words in (["--nproc_per_node=3", "--x", "y"], ["--x", "--nproc-per-node", "3", "y"]):
        found: list[tuple[list[str], dict[str, str]]] = []
        monkeypatch.setattr(
            start_module.os, "execve", lambda path, given, environment, to=found: to.append((given, environment))
        )
        monkeypatch.setattr("sys.argv", ["megatron-serve", *words])
        with pytest.raises(SystemExit):  # the test's execve returns, and then the command itself runs
            start("serve")
        [(called, environment)] = found
        assert called[-3:] == ["megatron_core.commands.serve", "--x", "y"]
        assert called[-7:-3] == ["-Werror::FutureWarning", "-m", "megatron_core.commands.start_ranks", "3"]
        assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)


@pytest.mark.parametrize(
    ("words", "rank", "said"),
    [
        (["--nproc-per-node"], None, r"--nproc-per-node  must be an integer >= 1"),
        (["--nproc-per-node", "0"], None, r"--nproc-per-node 0 must be an integer >= 1"),
        (["--nproc-per-node", "2"], "0", r"torchrun has started this one; remove --nproc-per-node"),
    ],
)
def test_ranks_that_cannot_be_started(
    words: list[str], rank: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["megatron-generate", *words])
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit, match=f"megatron-generate: .*{said}"):
        start("generate_text")


def test_an_entry_point_with_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/megatron-lm"])
    with pytest.raises(SystemExit, match=f"megatron-lm: not a command of megatron-native.*{command_name('train')}"):
        command()


def test_the_page_lists_all_commands() -> None:
    rows = re.findall(r"^\| `(megatron-[\w-]+)` \| `(.*?)` \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    scripts = {name: f"tools/{module}.py" for name, module in modules().items()}
    assert dict(rows) == scripts | {"megatron-train": "pretrain_gpt.py"}
