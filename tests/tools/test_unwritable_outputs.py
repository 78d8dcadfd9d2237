"""Where a tool cannot write, it says so before it works, with its flag and the way out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets.files import write

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("tool", "flag", "name", "given"),
    [
        ("train_tokenizer", "--output", "a.json", ["--input", "text.txt", "--vocab-size", "300"]),
        ("merge_datasets", "--output-prefix", "a", ["--input", "one"]),
        ("inspect_dataset", "--png", "a.png", ["one"]),
    ],
)
def test_a_place_that_is_a_file(tmp_path: Path, tool: str, flag: str, name: str, given: list[str]) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    write(tmp_path / "one", [[1, 2, 3], [4, 5]])
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *given, flag, f"text.txt/{name}"]
    result = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"{tool}: {flag} text.txt/{name}: nothing can be written in text.txt (")
    assert said.endswith("; choose another folder")
