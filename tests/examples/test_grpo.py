"""The example of reinforcement learning has the same bits in two layouts and after a resume, and learns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_core.verify.ranks import run_ranks, this_world

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import grpo

STEPS = 12
WARM_UP = 8


def _history(args: list[str]) -> list[dict[str, Any]]:
    return grpo.run(args, this_world(), WARM_UP)


@pytest.fixture(scope="module")
def undisturbed() -> list[dict[str, Any]]:
    return run_ranks(1, _history, ["--train-iters", str(STEPS)])[0]


def test_two_layouts_have_the_same_bits(undisturbed: list[dict[str, Any]]) -> None:
    args = ["--train-iters", str(STEPS), "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    assert run_ranks(2, _history, args) == [undisturbed, undisturbed]
    assert len(undisturbed) == STEPS - WARM_UP
    assert len({values["loss"] for values in undisturbed}) > 1 or any(values["reward"] for values in undisturbed)


def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = str(tmp_path)
    args = ["--save", folder, "--load", folder, "--save-interval", "5", "--train-iters"]
    begun = run_ranks(1, _history, [*args, "10"])[0]
    resumed = run_ranks(2, _history, [*args, str(STEPS)])
    for later in resumed:
        assert begun + later == undisturbed


def test_rewards_are_those_of_sums() -> None:
    assert grpo.reward((3, 9), tuple(grpo.encode("12\n"))) == 1.0
    assert grpo.reward((3, 9), tuple(grpo.encode("12"))) == 0.0
    assert grpo.reward((3, 9), tuple(grpo.encode("13\n"))) == 0.0
