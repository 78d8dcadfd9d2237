"""The program on docs/shard_my_model.md prints the same losses on one and on two ranks, and its split is verified."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs import run_ranks_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "shard_my_model.md"


def test_the_program_trains_on_one_and_two_ranks_and_is_verified(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(program.splitlines()) < 40
    (tmp_path / "train_split_model.py").write_text(program, encoding="utf-8")
    losses = []
    for launcher in ("python", "torchrun --nproc-per-node 2"):
        output = _run(f"{launcher} train_split_model.py", tmp_path)
        losses.append([float(loss) for loss in re.findall(r"step \d+: loss (\S+)", output)])
    alone, together = losses
    assert len(alone) == len(together) == 20
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 2e-3
    assert alone[-1] < 0.9 * alone[0]
    command = f"python {ROOT / 'tools' / 'verify_module.py'} train_split_model.py:make_model --layout tp2"
    assert "tp2 agrees with one process" in _run(command, tmp_path)


def _run(command: str, folder: Path) -> str:
    result = run_ranks_of(command, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
