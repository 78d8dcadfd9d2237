"""If a tool cannot write its output, it ends before its work with an error that has the flag and the fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports.report import write_report
from tests.datasets.files import write
from tests.monitor.examples import step
from tests.programs import run_program


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
    result = run_program(f"tools/{tool}.py", *given, flag, f"text.txt/{name}", cwd=tmp_path)
    assert result.returncode == 1
    (said,) = result.stderr.splitlines()
    assert said.startswith(f"{tool}: {flag} text.txt/{name}: nothing can be written in text.txt (")
    assert said.endswith("; choose another folder")


@pytest.mark.parametrize("tool", ["collect_corpus --output", "merge_datasets --input one --output-prefix"])
def test_links_in_a_circle(tmp_path: Path, tool: str) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 50)
    write(tmp_path / "one", [[1, 2, 3], [4, 5]])
    (tmp_path / "circle").symlink_to("circle")
    name, *flags = tool.split()
    more = ["--folder", "."] if name == "collect_corpus" else []
    result = run_program(f"tools/{name}.py", *flags, "circle/a", *more, cwd=tmp_path)
    assert result.returncode == 1
    (said,) = result.stderr.splitlines()
    assert "circle" in said


def test_a_lock_that_can_never_be_made(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "lock").symlink_to(tmp_path / "absent" / "lock")
    flags = ["--input", "text.jsonl", "--output-prefix", "out", "--tokenizer-type", "ByteLevelTokenizer"]
    result = run_program("tools/preprocess_data.py", *flags, cwd=tmp_path)
    assert result.returncode == 1
    assert (
        "--output-prefix out: out.work cannot be created (it is a symbolic link, which is not allowed here; remove it)"
        in result.stderr
    )


def test_the_report_of_a_folder_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe")
    (tmp_path / name).mkdir()
    sink = JsonLinesSink(tmp_path / name / "metrics.jsonl")
    sink.on_step(step(1))
    sink.close()
    write_report(tmp_path / name, tmp_path / "page.html")
    assert "\\udcff\\udcfe" in (tmp_path / "page.html").read_text(encoding="utf-8")
