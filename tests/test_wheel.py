"""The wheel has all data files of the package, and the drop-in works from it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PROGRAM = """
import importlib.metadata
import megatron_core.drop_in
import deepspeed
from deepspeed.translation import known_keys
from megatron.core.transformer import TransformerConfig
print(importlib.metadata.version("deepspeed"), deepspeed.__version__, len(known_keys()) > 100, deepspeed.__file__)
"""


def _tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "megatron_core"], cwd=ROOT, capture_output=True, text=True, check=True)
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


@pytest.mark.whole_matrix
def test_the_drop_in_works_from_a_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*build, "--config-settings=wheel.cmake=false", str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert _tracked() <= set(archive.namelist())
        archive.extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("0.19.8 0.19.8 True "), run.stdout
    assert str(tmp_path / "site") in run.stdout
