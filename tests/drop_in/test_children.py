"""Interpreters that a program under the drop-in starts find its packages, too, whatever copies there are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.drop_in.deepspeed.reference import REFERENCE
from tests.drop_in.test_launcher import FOLDER, ROOT, python

REPORT = """
import importlib.metadata
import importlib.util
import sys

def report(*_):
    places = [importlib.util.find_spec(name).origin for name in ("deepspeed", "megatron.core", "megatron.training")]
    print(*places, importlib.metadata.version("deepspeed"), importlib.metadata.version("megatron_core"), flush=True)
"""
"""A module without torch, so that its processes start fast."""
CHILDREN = {
    "-c": "subprocess.run([sys.executable, '-c', 'from report import report; report()'], check=True, cwd=HERE)",
    "script": "subprocess.run([sys.executable, HERE + '/child.py'], check=True)",
    "-m": "subprocess.run([sys.executable, '-m', 'child'], check=True, cwd=HERE)",
    "program of the drop-in": "subprocess.run([sys.executable, '-m', 'megatron_core.drop_in', 'child.py'], "
    "check=True, cwd=HERE, stderr=subprocess.DEVNULL)",
    "child of a child": "subprocess.run([sys.executable, '-c', 'import subprocess, sys; "
    'subprocess.run([sys.executable, "child.py"], check=True)\'], check=True, cwd=HERE)',
    "spawn": "process = multiprocessing.get_context('spawn').Process(target=report); process.start(); process.join()",
    "clone first": "subprocess.run([sys.executable, '-c', 'import sys; sys.path.insert(0, \".\"); import megatron; "
    'sys.path.insert(0, "clone"); from report import report; report()\'], check=True, cwd=HERE)',
}
"""Ways to start a child."""
START = """
import multiprocessing
import subprocess
import sys
from pathlib import Path

from report import report

HERE = str(Path(__file__).parent)
if __name__ == "__main__":
    CODE
"""
DEEPSPEED, CORE, TRAINING = (
    FOLDER / name / "__init__.py" for name in ("deepspeed", "megatron/core", "megatron/training")
)
EXPECTED = f"{DEEPSPEED} {CORE} {TRAINING} 0.19.8 0.20.0\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A program's folder with clones of both packages, one of which has an ``__init__.py`` in the namespace."""
    for package in ("deepspeed", "megatron", "megatron/core", "clone/megatron/core", "clone/deepspeed"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('the other one')")
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "child.py").write_text("from report import report\nreport()\n")
    return tmp_path


@pytest.mark.every_case
@pytest.mark.parametrize("child", CHILDREN)
def test_a_child_finds_the_packages_before_clones_beside_it(child: str, folder: Path) -> None:
    (folder / "program.py").write_text(START.replace("CODE", CHILDREN[child]))
    done = python("-m", "megatron_core.drop_in", folder / "program.py", PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert done.stdout == EXPECTED, done.stderr


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
def test_a_child_finds_the_packages_before_installed_ones(folder: Path) -> None:
    installed = os.pathsep.join(map(str, (ROOT, REFERENCE, REFERENCE.parent / "megatron-core")))
    (folder / "program.py").write_text(START.replace("CODE", CHILDREN["script"]))
    (folder / "deepspeed" / "__init__.py").unlink()
    done = python("-m", "megatron_core.drop_in", folder / "program.py", PYTHONPATH=installed)
    assert done.stdout == EXPECTED, done.stderr
    assert len(done.stderr.splitlines()) == 2, "the child repeats the lines about other copies"


def test_the_other_ways_to_start_have_the_same_effect(folder: Path) -> None:
    program = folder / "program.py"
    program.write_text("import megatron_core.drop_in\n" + START.replace("CODE", CHILDREN["script"]))
    done = python(program)
    assert done.stdout == EXPECTED, done.stderr
    program.write_text(START.replace("CODE", CHILDREN["script"]))
    done = python(program, PYTHONPATH=str(FOLDER))
    assert done.stdout == EXPECTED, done.stderr


def test_the_installations_own_sitecustomize_still_runs(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("print('installed')")
    (folder / "program.py").write_text(START.replace("CODE", "subprocess.run([sys.executable, '-c', ''], check=True)"))
    done = python("-m", "megatron_core.drop_in", folder / "program.py", PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert done.stdout == "installed\n" * 2, done.stderr


def test_a_module_of_the_namespace_in_another_project_is_found(folder: Path) -> None:
    other = folder / "other"
    (other / "megatron" / "bridge").mkdir(parents=True)
    (other / "megatron" / "bridge" / "__init__.py").write_text("NAME = 'bridge'")
    (folder / "program.py").write_text("from megatron.bridge import NAME\nprint(NAME)\n")
    done = python("-m", "megatron_core.drop_in", folder / "program.py", PYTHONPATH=f"{ROOT}{os.pathsep}{other}")
    assert done.stdout == "bridge\n", done.stderr


def test_another_copy_is_found_after_the_drop_in_is_switched_off(folder: Path) -> None:
    (folder / "deepspeed" / "__init__.py").write_text("NAME = 'the other one'")
    (folder / "program.py").write_text(
        "import subprocess, sys\nimport megatron_core.drop_in\nmegatron_core.drop_in.deactivate()\n"
        "import deepspeed\nprint(deepspeed.NAME, flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import deepspeed; print(deepspeed.NAME)'], check=True)\n"
    )
    done = python(folder / "program.py", PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")
    assert done.stdout == "the other one\n" * 2, done.stderr
