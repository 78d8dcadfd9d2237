"""The example with a calculator has the same bits in two layouts, and its trajectories are those of its examples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_core.post_training import Turn
from megatron_core.verify.ranks import run_ranks, this_world

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import grpo
import grpo_calculator

STEPS = 13
WARM_UP = 11
SMALLER = {"QUESTIONS": 8, "EPISODES": 4}


def _history(args: list[str]) -> list[dict[str, Any]]:
    args = [*args, "--train-iters", str(STEPS)]
    return grpo.run(args, this_world(), WARM_UP, grpo_calculator.warm_up, grpo_calculator.learn)


def test_two_layouts_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALLER.items():
        monkeypatch.setattr(grpo_calculator, name, value)
    (alone,) = run_ranks(1, _history, [])
    ranks = run_ranks(2, _history, ["--tensor-model-parallel-size", "2", "--sequence-parallel"])
    assert ranks == [alone, alone]
    assert len(alone) == STEPS - WARM_UP
    # The model makes calls, and the calculator's results reach the episodes.
    assert max(values["calls"] for values in alone) > 0
    assert all(values["largest difference"] == 0.0 for values in alone)


def test_the_calculator_replies_and_rewards() -> None:
    episode = grpo_calculator.example((37, 46))
    environment = grpo_calculator.Calculator((37, 46))
    symbols = grpo_calculator.Symbols()
    assert symbols.detokenize(episode.tokens) == "37*46=<37*46>1702=1702\n"
    assert episode.num_learned == len("<37*46>1702\n")

    def step(text: str) -> Any:
        return environment.step(Turn(tuple(symbols.tokenize(text)), text, "stop"))

    assert symbols.detokenize(environment.reset()) == "37*46="
    assert symbols.detokenize(step("<37*46>").text) == "1702="
    assert symbols.detokenize(step("<37**>").text) == "="
    assert (step("1702\n").reward, step("1702\n").done) == (1.0, True)
    assert step("1703\n").reward == step("1702").reward == 0.0


@pytest.mark.parametrize("call", ["<2*3", "2*3>", "<__import__('os')>", "<99999*2>", "<2*3*4>"])
def test_only_multiplications_are_computed(call: str) -> None:
    assert grpo_calculator.product(call) == ""
