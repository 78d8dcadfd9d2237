"""Run every command of the README, of docs/train.md and of the pages by task, at a size suitable for a test."""

from __future__ import annotations

import multiprocessing
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import examples.commands
from megatron_core.commands.start import modules
from megatron_core.config.file import read_config
from megatron_core.config.validate import problems
from tests.programs import free_port, run_program, run_ranks_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TRAIN = (ROOT / "docs" / "train.md").read_text()
COMMANDS = modules()
SMALL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 32 --train-iters 2"
SMALLER = f"{SMALL} --lr-warmup-iters 0 --micro-batch-size 1 --global-batch-size 4 --eval-iters 1"


def _commands(pages: str = README + TRAIN) -> list[str]:
    """The commands of pages, each once, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", pages, flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]
    return list(dict.fromkeys(lines))


def _run(folder: Path, command: str) -> str:
    """Run a command in ``folder``, which looks like the repository's root: in this process, in forks of it, or, if it
    is not one of Python, as a process of its own. A training of 20 steps takes 4."""
    command = command.replace("--train-iters 20", "--train-iters 4")
    launcher, program, *flags = shlex.split(command)
    if "--max-restarts" in command or "--nnodes" in command:
        # torchrun itself is a fork, and so are its ranks.
        result = run_ranks_of(command.replace("torchrun", "python -m torch.distributed.run"), folder)
    elif launcher == "torchrun":
        result = run_ranks_of(command, folder)
    elif launcher == "python" and program.endswith(".py"):
        result = run_program(program, *flags, cwd=folder)
    elif launcher in COMMANDS:
        module = f"megatron_core.commands.{COMMANDS[launcher]}"
        result = run_ranks_of(shlex.join(["python", "-m", module, program, *flags]), folder)
    else:
        result = subprocess.run([launcher, program, *flags], cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with this repository's programs, and a small corpus of its own sources."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("tools", "examples", "megatron_core"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("pretrain_gpt.py", "Makefile", "pyproject.toml"):
        shutil.copyfile(ROOT / name, folder / name)
    collect = f"python tools/collect_corpus.py --folder {ROOT / 'megatron_core'} --output corpus.jsonl"
    _run(folder, collect)
    return folder


@pytest.fixture(scope="module")
def data(clone: Path) -> list[str]:
    """The commands that create a tokenizer and tokens, after they have run."""
    makers = ("python tools/train_tokenizer.py", "python tools/preprocess_data.py")
    commands = [command for command in _commands() if command.startswith(makers)]
    for command in commands:
        _run(clone, command.replace("--vocab-size 8192", "--vocab-size 512"))
    return commands


def test_readme_commands_run(clone: Path, data: list[str]) -> None:
    """In the order of the pages, because commands use files of earlier ones."""
    assert len(data) == 2
    seen = 0
    for command in _commands():
        if command in data or command.startswith(("make", "pip install", "torchrun --nnodes")):
            continue  # tested above or below, or, for pip install, by every run of these tests
        command = command.replace("--nproc-per-node 8", "--nproc-per-node 4")
        command = re.sub(r'(--layouts "[^"]+") "[^"]+" ', r"\1 ", command)  # without the second layout
        if "--config" in command:
            command += f" {SMALLER} --save from_config"
        _run(clone, command)
        seen += 1
    assert seen >= 8
    assert (clone / "loss.png").stat().st_size > 10_000


@pytest.mark.usefixtures("data")
def test_two_nodes(clone: Path) -> None:
    """Both nodes' commands at the same time, on this machine."""
    commands = [command for command in _commands() if command.startswith("torchrun --nnodes")]
    assert len(commands) == 2
    local = {"node0": "127.0.0.1", "29500": str(free_port()), "--nproc-per-node 8": "--nproc-per-node 2"}
    nodes = []
    for command in commands:
        for written, used in local.items():
            command = command.replace(written, used)
        nodes.append(f"{command} {SMALLER} --save two_nodes")
    second = multiprocessing.get_context("fork").Process(target=_run, args=(clone, nodes[1]))
    second.start()
    _run(clone, nodes[0])
    second.join()
    assert second.exitcode == 0
    assert (clone / "two_nodes" / "latest_checkpointed_iteration.txt").read_text() == "2"


SMALLER_VALUES = {"--hidden-size": "32", "--seq-length": "32", "--eval-iters": "1"}
"""Values of these flags in the trainings of an example: a test shows that its steps fit each other."""


def _forked(command: list[str], cwd: Path, **_: object) -> subprocess.CompletedProcess[str]:
    """In place of ``subprocess.run``: a step of an example as a fork of this process, which has loaded torch."""
    assert command[0] == sys.executable
    words = [SMALLER_VALUES.get(flag, word) for flag, word in pairwise(command)]
    ended = run_ranks_of(shlex.join(["python", *words]), cwd)
    print(ended.stdout, ended.stderr)
    return ended


def test_quickstart(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of ``make quickstart CORPUS=...`` after installation."""
    monkeypatch.setattr(examples.commands, "subprocess", SimpleNamespace(run=_forked))
    output = _run(clone, f"make --dry-run quickstart CORPUS={ROOT / 'docs'}")
    assert f'python examples/quickstart.py --corpus "{ROOT / "docs"}"' in output
    sizes = "--vocab-size 512 --global-batch-size 32 --train-iters 2 --more-iters 2"
    program = f"python examples/quickstart.py --corpus {ROOT / 'docs'} {sizes}"
    output = _run(clone, f"{program} --output {clone / 'quick'}")
    assert "layout changed from tp2 pp2 v2 to tp2 dp2 sp zero1" in output
    assert f"loss curve   {clone / 'quick' / 'loss.png'}" in output
    assert "pytest" in _run(clone, "make --dry-run test")


def test_example_configuration_is_legal() -> None:
    config = read_config(ROOT / "examples" / "gpt_1b.yaml")
    # Additions of the command to the file: --data-path and --save.
    left = [
        sentence for sentence in problems(config, 8) if "data_path" not in sentence and "without save" not in sentence
    ]
    assert left == []


def test_layers_alone(tmp_path: Path) -> None:
    """The README's Python example, on two ranks."""
    code = re.search(r"```python\n(.*?)```", README, flags=re.DOTALL)[1]
    script = tmp_path / "layers.py"
    script.write_text(f"{code}\nassert out.shape == x.shape and bias is None\n")
    _run(ROOT, f"torchrun --standalone --nproc-per-node 2 {script}")


@pytest.mark.drawn(0)
@pytest.mark.parametrize("page", ["debug.md", "continue.md"])
def test_commands_of_a_page_run(page: str, clone: Path) -> None:
    """In the order of the page; the run with a planted fault ends at its last step."""
    commands = _commands((ROOT / "docs" / page).read_text())
    assert len(commands) >= 4
    for command in commands:
        _run(clone, command)
    if page == "debug.md":
        assert (clone / "runs/fault/latest_checkpointed_iteration.txt").read_text() == "6"
