"""The choice of tests for ``make test-changed``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import changed
from tests.changed import ROOT, changed_files, changed_folders


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        ([], []),
        (["megatron_core/transformer/attention.py", "README.md"], ["tests"]),
        (["megatron_core/features/qk_clip/clip.py"], ["tests/features/qk_clip"]),
        (["megatron_core/any_model/cut.py", "tests/any_model/test_cut.py"], ["tests/any_model"]),
        (["megatron_core/drop_in/deepspeed/runtime/engine.py"], ["tests/drop_in/deepspeed"]),
        (
            ["csrc/cpu/norm.cpp", "docs/train.md", "examples/quickstart.py"],
            ["tests/docs", "tests/examples", "tests/ops"],
        ),
        (["tests/test_errors.py", "tests/parity/rows.py"], ["tests/parity", "tests/test_errors.py"]),
        (["tests/runs.py", "tests/parity/rows.py"], ["tests"]),
        (["pyproject.toml"], ["tests"]),
        (["tests/test_that_was_removed.py"], []),
        (["megatron_core/planner/no_longer/there.py"], ["tests/planner"]),
    ],
    ids=str,
)
def test_folders(files: list[str], folders: list[str]) -> None:
    assert changed_folders(files) == folders


def test_all_folders_exist() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    folders = {folder for name in names if name and (folder := changed.folder_of(name)) is not None}
    assert len(folders) > 20
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []


def test_changes_since_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        name = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for name in ("kept.py", "edited.py"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "edited.py").write_text("2\n")
    (tmp_path / "added.py").write_text("3\n")
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    assert changed_files("HEAD") == ["edited.py", "added.py"]
