"""The program on docs/from_deepspeed.md trains on one and on two ranks, and its checkpoint moves between them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.programs import run_ranks_of

PAGE = Path(__file__).parents[2] / "docs" / "from_deepspeed.md"


def test_the_program_trains_on_one_and_two_ranks(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(program.splitlines()) < 40
    found = []
    for launcher in ("python", "torchrun --nproc-per-node 2"):
        folder = tmp_path / launcher.split()[0]
        folder.mkdir()
        (folder / "train.py").write_text(program, encoding="utf-8")
        result = run_ranks_of(f"{launcher} -m megatron_core.drop_in train.py", folder)
        assert result.returncode == 0, result.stderr
        lines = re.findall(r"step (\d+): loss (\S+), norm (\S+)", result.stdout)
        found.append([(int(step), float(loss), float(norm)) for step, loss, norm in lines])
        assert (folder / "checkpoints" / "latest").read_text() == "global_step48"
        assert (folder / "checkpoints" / "global_step48" / "iter_0000048").is_dir()
    # The ranks divide the samples in another order, as DeepSpeed's loader does.
    for lines in found:
        assert [step for step, _, _ in lines] == [16, 32, 48]
        assert lines[-1][1] < 0.7 * lines[0][1]
    # One process continues with the checkpoint of two ranks.
    load = f"engine.load_checkpoint({str(tmp_path / 'torchrun' / 'checkpoints')!r})"
    resumed = program.replace("for epoch in range(3)", f"{load}\nfor epoch in range(1)")
    (tmp_path / "resume.py").write_text(resumed, encoding="utf-8")
    result = run_ranks_of("python -m megatron_core.drop_in resume.py", tmp_path)
    (line,) = re.findall(r"step 64: loss (\S+),", result.stdout)
    assert float(line) < found[1][0][1]
