"""The programs on docs/post_training.md run, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_core.post_training import objectives
from tests.programs import run_ranks_of

PAGE = Path(__file__).parents[2] / "docs" / "post_training.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def program_with(text: str) -> str:
    (program,) = [program for program in PROGRAMS if text in program]
    return program


def test_the_loop_prints_no_difference(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        "\n".join([*PROGRAMS[:4], "print('masks', [episode.mask.count(0) for episode in episodes])"])
    )
    result = run_ranks_of("python loop.py", tmp_path)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"step \d: gradient norm (\S+), largest difference (\S+)", result.stdout)
    assert [difference for _, difference in lines] == ["0.0"] * 3
    assert any(float(norm) > 0 for norm, _ in lines)
    # The page's other programs continue the loop: tokens of two versions are unfinished at the end.
    assert "versions [3, 4]" in result.stdout
    # Of each episode: the prompt after its first token, and the results of two turns.
    assert "masks [4, 4, 4, 4]" in result.stdout


@pytest.mark.parametrize("layout", ["", " --tensor-model-parallel-size 2 --sequence-parallel"])
def test_ppo_raises_the_reward(layout: str, tmp_path: Path) -> None:
    flags = " --dataloader-type external"
    (tmp_path / "ppo.py").write_text(program_with("mean reward").replace(flags, flags + layout))
    start = "torchrun --nproc-per-node 2 ppo.py" if layout else "python ppo.py"
    result = run_ranks_of(start, tmp_path)
    assert result.returncode == 0, result.stderr
    rewards = [float(reward) for reward in re.findall(r"step 1?\d: mean reward (\S+), loss", result.stdout)]
    assert min(rewards) < 0.2
    assert max(rewards) > 4.0


def test_a_reward_model_learns_its_pairs(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(program_with("chosen above rejected"))
    result = run_ranks_of("python reward.py", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "chosen above rejected: True, True" in result.stdout


def test_an_objective_of_ones_own() -> None:
    names: dict = {}
    exec(program_with("TokenObjective"), names)
    assert names["objective"].metric_names == ("distance",)

    class Batch(dict):
        def report(self, name: str, x: torch.Tensor) -> None:
            self["reported"] = (name, x)

    batch = Batch(target=torch.tensor([[-1.0, -2.0]]))
    losses = names["objective"](torch.tensor([[-2.0, -2.0]]), batch)
    assert losses.tolist() == [[0.5, 0.0]]
    assert batch["reported"][0] == "distance"


def test_every_objective_is_on_the_page() -> None:
    text = PAGE.read_text()
    functions = {name: value for name, value in vars(objectives).items() if not name.startswith("_")}
    makes = {name: getattr(function, "__annotations__", {}).get("return") for name, function in functions.items()}
    names = [name for name, result in makes.items() if result is objectives.TokenObjective]
    assert len(names) >= 11
    assert all(f"| `{name}(" in text for name in names)
