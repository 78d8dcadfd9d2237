"""The programs on docs/from_fsdp.md print the same losses, and so does FSDP's with the changed import."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs import run_ranks_of

PAGE = Path(__file__).parents[2] / "docs" / "from_fsdp.md"
TWO_RANKS = "torchrun --nproc-per-node 2"


def test_both_programs_print_the_same_losses(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(# (\S+\.py)\n.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [name for _, name in programs] == ["train_fsdp.py", "train_engine.py"]
    for program, name in programs:
        assert len(program.splitlines()) < 40
        (tmp_path / name).write_text(program, encoding="utf-8")
    new, old = re.findall(
        r"^(from megatron_core import \w+)  # instead of: (.*)$", PAGE.read_text(encoding="utf-8"), re.M
    )[0]
    program = (tmp_path / "train_fsdp.py").read_text(encoding="utf-8")
    assert program.count(f"{old}\n") == 1
    (tmp_path / "train_changed.py").write_text(program.replace(old, new), encoding="utf-8")
    losses = []
    launches = [(TWO_RANKS, "train_fsdp.py"), (TWO_RANKS, "train_engine.py"), ("python", "train_engine.py")]
    for launcher, name in [*launches, (TWO_RANKS, "train_changed.py")]:
        result = run_ranks_of(f"{launcher} {name}", tmp_path)
        assert result.returncode == 0, result.stderr
        losses.append([float(loss) for loss in re.findall(r"step \d+: loss (\S+)", result.stdout)])
    assert [len(each) for each in losses] == [20, 20, 20, 20]
    for each in losses[1:]:
        assert max(abs(a - b) for a, b in zip(each, losses[0], strict=True)) < 2e-3  # float32, printed with 4 digits
    assert losses[0][-1] != losses[0][0]
