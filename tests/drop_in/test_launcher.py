"""``python -m megatron_core.drop_in`` runs programs written for Megatron-LM unchanged."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_core.drop_in.program_imports import report
from megatron_core.errors import LayoutError
from megatron_core.launcher import check_environment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "megatron_core" / "drop_in"
PROGRAM = """
import sys

import neighbour
from megatron.core import mpu
from megatron.core.transformer.enums import AttnMaskType
from megatron.training import get_args

print(neighbour.NAME, __name__, sys.argv[1:], mpu.__file__)
"""


def python(*arguments: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter without the folder of Megatron's names on its path."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("NAME = 'neighbour'")
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_program_finds_the_names_and_its_own_modules(program: Path) -> None:
    found = python("-m", "megatron_core.drop_in", program, "--lr", "1")
    expected = FOLDER / "megatron" / "core" / "parallel_state.py"
    assert found.stdout == f"neighbour __main__ ['--lr', '1'] {expected}\n", found.stderr
    assert found.stderr == ""


def test_a_clone_of_megatron_beside_the_program_comes_second(program: Path) -> None:
    (program.parent / "megatron" / "core").mkdir(parents=True)
    (program.parent / "megatron" / "core" / "__init__.py").write_text("raise SystemExit('the other one')")
    found = python("-m", "megatron_core.drop_in", program)
    assert str(FOLDER / "megatron") in found.stdout
    assert len(found.stderr.splitlines()) == 1
    assert f"not {program.parent / 'megatron' / 'core'}" in found.stderr


@pytest.mark.parametrize("in_a_child", (False, True))
def test_a_package_megatron_of_the_program_stays_its_own(program: Path, in_a_child: bool) -> None:
    """GPT-NeoX and Megatron-DeepSpeed have one, with other modules, and take only ``deepspeed`` from elsewhere."""
    package = program.parent / "megatron"
    package.mkdir()
    (package / "__init__.py").write_text("def get_args(): return 'own'")
    (package / "training.py").write_text("from megatron import get_args")
    program.write_text(
        "import deepspeed, megatron.training as t\nprint(t.get_args(), t.__file__, deepspeed.__file__)\n"
    )
    if in_a_child:
        child = program.parent / "parent.py"
        child.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(program)!r}], check=True)\n")
        program = child
    found = python("-m", "megatron_core.drop_in", program)
    assert found.stdout == f"own {package / 'training.py'} {FOLDER / 'deepspeed' / '__init__.py'}\n", found.stderr
    assert f"replacing deepspeed alone; {package} is a megatron of its own" in found.stderr


def test_the_first_import_of_a_program_is_enough(program: Path) -> None:
    program.write_text("import megatron_core.drop_in\n" + PROGRAM)
    found = python(program)
    assert found.stdout.startswith("neighbour __main__ []"), found.stderr


def test_another_megatron_that_is_already_imported_is_an_error(program: Path) -> None:
    (program.parent / "megatron" / "core").mkdir(parents=True)
    (program.parent / "megatron" / "core" / "__init__.py").write_text("")
    program.write_text("import megatron.core\nimport megatron_core.drop_in\n")
    found = python(program)
    assert found.returncode == 1
    assert "import megatron_core.drop_in before it" in found.stderr.splitlines()[-1]


def test_a_module_runs_as_a_program(program: Path) -> None:
    found = python("-m", "megatron_core.drop_in", "-m", "program", "x", cwd=program.parent)
    assert found.stdout.startswith("neighbour __main__ ['x']"), found.stderr


def test_the_folder_for_pythonpath_is_printed() -> None:
    assert python("-m", "megatron_core.drop_in", "--path").stdout == f"{FOLDER}\n"


@pytest.mark.parametrize("arguments", [["nothing.py"], ["-m"], [""]])
def test_a_missing_program_is_one_sentence(arguments: list[str]) -> None:
    found = python("-m", "megatron_core.drop_in", *arguments)
    assert found.returncode != 0
    assert found.stderr.splitlines() == [
        f"error: no program {arguments[-1] if arguments != ['-m'] else ''!r}; "
        "give the path of a Python file, or -m MODULE"
    ]


@pytest.mark.parametrize("name", ["no.such.module", "megatron.core.nothing", "os.path.x", "..", ".a", "neighbours", ""])
def test_a_missing_module_is_one_sentence(name: str, program: Path) -> None:
    (program.parent / "neighbours").mkdir()
    (program.parent / "neighbours" / "__init__.py").write_text("")  # a package without __main__
    found = python("-m", "megatron_core.drop_in", "-m", name, cwd=program.parent)
    assert found.returncode == 1
    assert re.fullmatch(rf"error: no (module|program) {re.escape(repr(name))}.*\n", found.stderr), found.stderr


def test_what_a_module_lacks_itself_is_its_own_error(program: Path) -> None:
    (program.parent / "package").mkdir()
    (program.parent / "package" / "__init__.py").write_text("import lacking")
    found = python("-m", "megatron_core.drop_in", "-m", "package.module", cwd=program.parent)
    assert found.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'lacking'"


WRONG = {"RANK": ("x", "-1", "1.5"), "WORLD_SIZE": ("y", "0", ""), "LOCAL_RANK": ("²",), "LOCAL_WORLD_SIZE": ("0",)}
WRONG |= {"MASTER_PORT": ("x", "70000", "-1")}


@pytest.mark.parametrize(("variable", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_launchers_variable_without_sense_is_one_sentence(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(
        LayoutError, match=rf"^{variable}='.*' in the environment must be an integer (>= \d|from 0 to 6)"
    ):
        check_environment()


def test_the_launcher_checks_the_environment_before_the_program_runs(program: Path) -> None:
    program.write_text("print('started')")
    found = python("-m", "megatron_core.drop_in", program, WORLD_SIZE="y")
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("error: WORLD_SIZE='y' in the environment must be an integer >= 1; start the ranks")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize("flag", ["--cpu=0", "--cpu=x", "--cpu=", "--cpu=-1"])
def test_a_wrong_number_of_devices_is_one_sentence(flag: str, program: Path) -> None:
    found = python("-m", "megatron_core.drop_in", flag, program)
    assert found.stderr == f"error: {flag}: the number of devices must be an integer from 1 to 9999\n"


def test_without_arguments_the_usage_is_printed() -> None:
    found = python("-m", "megatron_core.drop_in")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("usage: python -m megatron_core.drop_in [--cpu[=N]] PROGRAM")


def test_transformers_and_accelerate_find_deepspeed(program: Path) -> None:
    program.write_text(
        "import importlib.metadata as found\nimport deepspeed\nprint(found.version('deepspeed'), deepspeed.__file__)"
    )
    found = python("-m", "megatron_core.drop_in", program)
    assert found.stdout == f"0.19.8 {FOLDER / 'deepspeed' / '__init__.py'}\n", found.stderr


def test_another_deepspeed_comes_second_or_is_an_error(program: Path) -> None:
    (program.parent / "deepspeed").mkdir()
    (program.parent / "deepspeed" / "__init__.py").write_text("")
    found = python("-m", "megatron_core.drop_in", program)
    assert f"not {program.parent / 'deepspeed'}" in found.stderr
    program.write_text("import deepspeed\nimport megatron_core.drop_in\n")
    found = python(program)
    assert found.returncode == 1
    assert "deepspeed is already imported" in found.stderr.splitlines()[-1]


def test_a_rank_ends_as_the_interpreter_does(tmp_path: Path) -> None:
    """One of several ranks waits for the program's threads, and calls its exit functions; an error is its status."""
    program = tmp_path / "program.py"
    late = "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()"
    program.write_text(f"import atexit, sys, threading, time\natexit.register(print, 'exit')\n{late}\nprint('main')\n")
    found = python("-m", "megatron_core.drop_in", program, WORLD_SIZE="2")
    assert (found.returncode, found.stdout) == (0, "main\nthread\nexit\n")
    program.write_text("import sys\nsys.exit(3)\n")
    assert python("-m", "megatron_core.drop_in", program, WORLD_SIZE="2").returncode == 3


def test_a_check_reads_files_only(tmp_path: Path) -> None:
    """Not a named pipe, which would block, a device, a folder with the name of a file, or a file that is gone."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "device.py").symlink_to("/dev/zero")
    (tmp_path / "dangling.py").symlink_to("absent")
    (tmp_path / "linked.py").symlink_to("pipe.py")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "folder.py" / "inner.py").write_text("from megatron.core import parallel_state\n")
    names = ("dangling.py", "device.py", "linked.py", "pipe.py")
    expected = [f"not read     {tmp_path / name}  not a file" for name in names]
    summary, *lines = report(tmp_path).splitlines()
    assert summary.startswith("1 imported names, 100.0 % resolve") and lines == expected
    assert report(tmp_path / "pipe.py").splitlines()[1:] == expected[-1:]


def test_imports_of_a_program_are_checked_before_it_runs(program: Path) -> None:
    (program.parent / "more.py").write_text(
        "import megatron.core.enums\nimport os\nfrom megatron.energon import Batch\n"
        "from megatron.core.models.multimodal.llava_model import LLaVAModel\n"
        "from megatron.core import parallel_state, missing\nfrom megatron.core.nothing import name\n"
        "def later():\n    from megatron.core.nothing import name\n"
    )
    (program.parent / "old.py").write_text("from megatron import get_args\nprint 1\n")
    found = python("-m", "megatron_core.drop_in", "--check", program.parent)
    assert f"not parsed   {program.parent / 'old.py'}:2" in found.stdout
    found.stdout = "".join(line for line in found.stdout.splitlines(keepends=True) if "not parsed" not in line)
    lines = [line.split() for line in found.stdout.splitlines()]
    assert " ".join(lines[0]) == "8 imported names, 75.0 % resolve, 1 raise an error when they are used", found.stderr
    places = {(kind, module, name): (int(count), Path(place).name) for kind, count, module, name, place in lines[1:]}
    assert places == {
        ("missing", "megatron.core.nothing", "name"): (2, "more.py:6"),
        ("missing", "megatron.core", "missing"): (1, "more.py:5"),
        ("unsupported", "megatron.core.models.multimodal.llava_model", "LLaVAModel"): (1, "more.py:4"),
    }
    one = python("-m", "megatron_core.drop_in", "--check", program)
    assert one.stdout == "3 imported names, 100.0 % resolve, 0 raise an error when they are used\n"
    wrong = python("-m", "megatron_core.drop_in", "--check", "nowhere")
    assert wrong.stderr == "error: --check nowhere: give one existing file or folder\n"


@pytest.mark.parametrize("module", ["no.such.module", "json", "json.absent", ".relative", "a..b"])
def test_a_module_that_does_not_exist_is_one_sentence(module: str) -> None:
    found = python("-m", "megatron_core.drop_in", "-m", module)
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.startswith(f"error: no module {module!r} to run; ") and found.stderr.count("\n") == 1


def test_a_failing_import_of_a_package_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text("import absent_dependency")
    found = python("-m", "megatron_core.drop_in", "-m", "outer.inner", cwd=tmp_path)
    assert "No module named 'absent_dependency'" in found.stderr and "Traceback" in found.stderr


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK"])
def test_a_variable_of_the_launcher_that_is_not_a_number_is_one_sentence(name: str, program: Path) -> None:
    found = python("-m", "megatron_core.drop_in", program, **{name: "y"})
    assert found.returncode == 1 and found.stdout == ""
    assert found.stderr.startswith(f"error: {name}='y' in the environment must be an integer >= ")
    assert found.stderr.count("\n") == 1
