"""The program on docs/any_model.md prints the same losses on one and on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs import run_ranks_of

PAGE = Path(__file__).parents[2] / "docs" / "any_model.md"


def test_experts_on_one_and_four_ranks(tmp_path: Path) -> None:
    """The program of the section about experts prints what the page says."""
    section = PAGE.read_text(encoding="utf-8").split("## Experts on several ranks")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (shown,) = re.findall(r"```\n(dp1: .*?)```", section, flags=re.DOTALL)
    (tmp_path / "train_experts.py").write_text(program, encoding="utf-8")
    alone, together, first, last = shown.splitlines()
    for launcher, layout in (("python", alone), ("torchrun --nproc-per-node 4", together)):
        result = run_ranks_of(f"{launcher} train_experts.py", tmp_path)
        assert result.returncode == 0, result.stderr
        lines = [line for line in result.stdout.splitlines() if line.startswith(("step ", layout.split(":")[0]))]
        assert [lines[0], lines[1], lines[-1]] == [layout, first, last]


def test_the_program_trains_on_one_and_two_ranks(tmp_path: Path) -> None:
    program, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(program.splitlines()) < 40
    losses = []
    for launcher in ("python", "torchrun --nproc-per-node 2"):
        folder = tmp_path / launcher.split()[0]
        folder.mkdir()
        (folder / "train_my_model.py").write_text(program, encoding="utf-8")
        result = run_ranks_of(f"{launcher} train_my_model.py", folder)
        assert result.returncode == 0, result.stderr
        losses.append([float(loss) for loss in re.findall(r"step \d+: loss (\S+)", result.stdout)])
        assert (folder / "checkpoints" / "iter_0000048").is_dir()
    alone, together = losses
    assert len(alone) == len(together) == 48
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 2e-4
    assert alone[-1] < 0.5 * alone[0]


def test_the_program_with_long_sequences_prints_the_losses_of_the_page(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    program = next(code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "context_par" in code)
    (tmp_path / "train_long_sequences.py").write_text(program, encoding="utf-8")
    result = run_ranks_of("torchrun --nproc-per-node 2 train_long_sequences.py", tmp_path)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"step \d+: loss \S+", result.stdout)
    assert len(lines) == 3 and "\n".join(lines) in page


def test_the_program_with_images_prints_the_losses_of_the_page(tmp_path: Path) -> None:
    section = PAGE.read_text(encoding="utf-8").split("## Images and text")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (shown,) = re.findall(r"```\n(step 1: .*?)```", section, flags=re.DOTALL)
    commands = re.findall(r"(?:python|torchrun .*) train_images\.py.*", section)
    assert len(commands) == 4
    (tmp_path / "train_images.py").write_text(program, encoding="utf-8")
    for command in commands:
        result = run_ranks_of(command, tmp_path)
        assert result.returncode == 0, result.stderr
        assert "\n".join(re.findall(r"step \d+: loss \S+", result.stdout)) == shown.strip()
