"""The programs on docs/pipeline_my_model.md print the same losses on one and on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs import run_ranks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pipeline_my_model.md"
PROGRAMS = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize(("name", "program"), PROGRAMS, ids=[name for name, _ in PROGRAMS])
def test_the_programs_train_on_one_and_two_ranks(name: str, program: str, tmp_path: Path) -> None:
    assert len(program.splitlines()) < 40
    (tmp_path / name).write_text(program, encoding="utf-8")
    losses = []
    for launcher in ("python", "torchrun --nproc-per-node 2"):
        result = run_ranks_of(f"{launcher} {name}", tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
        losses.append([float(loss) for loss in re.findall(r"step \d+: loss (\S+)", result.stdout)])
    alone, together = losses
    assert len(alone) == len(together) == 20
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 2e-3
    assert alone[-1] < 0.9 * alone[0]


def test_the_page_has_both_programs() -> None:
    assert [name for name, _ in PROGRAMS] == ["train_stages.py", "train_layers.py"]
