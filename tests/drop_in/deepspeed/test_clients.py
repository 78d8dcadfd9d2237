"""The Trainer of transformers and accelerate over the drop-in, against the same programs without DeepSpeed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_core.drop_in import FOLDER
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed import clients

FLOAT32 = 2e-5
"""Bound on relative differences of losses and norms and on differences of weights: 6 to 8 steps in float32."""


def _check(found: dict[str, Any], expected: dict[str, Any], bound: float = FLOAT32) -> None:
    for name in ("losses", "norms", "rates", "eval"):
        np.testing.assert_allclose(found.get(name, []), expected.get(name, []), rtol=bound, atol=1e-7, err_msg=name)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in found["weights"].items():
        np.testing.assert_allclose(weights, expected["weights"][name], atol=20 * bound, err_msg=name)


@cache
def _trainer_alone(folder: str, is_named: bool) -> dict[str, Any]:
    return run_ranks(1, clients.train_with_trainer, None, folder, None, None, is_named)[0]


@pytest.fixture(scope="module")
def folder_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the Trainer in one process, without DeepSpeed."""
    return str(tmp_path_factory.mktemp("alone"))


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("ranks", "stage", "is_named"),
    [(2, 2, True), (1, 1, False), (2, 0, True), (2, 3, False)],
    ids=["zero2-named", "one-rank-zero1", "zero0-named", "zero3"],
)
def test_trainer(ranks: int, stage: int, is_named: bool, folder_alone: str, tmp_path: Path) -> None:
    """``is_named``: the JSON names optimizer and scheduler with ``auto`` values; else the Trainer makes them.

    Named ones differ from the Trainer's: it leaves biases and norms without decay and warms up linearly. The reference
    is then the Trainer alone with decay of all parameters and a formula of DeepSpeed's rates.
    """
    alone = _trainer_alone(folder_alone, is_named)
    if is_named:  # the engine steps the scheduler before the Trainer logs the rate
        alone = alone | {"rates": [1e-2 * clients.warmup_decay_share(step + 1) for step in range(clients.STEPS)]}
    named = {"optimizer": clients.OPTIMIZER, "scheduler": clients.SCHEDULER} if is_named else {}
    found = run_ranks(ranks, clients.train_with_trainer, FOLDER, str(tmp_path), clients.json_of(stage, **named))
    _check(found[0], alone)
    if stage >= 2:  # resume in the middle
        config = clients.json_of(stage, **named)
        (tmp_path / "final" / "model.safetensors").unlink()
        resumed = run_ranks(ranks, clients.train_with_trainer, FOLDER, str(tmp_path), config, 3)
        _check(resumed[0], alone)


@cache
def _accelerate_alone() -> dict[str, Any]:
    return run_ranks(1, clients.train_with_accelerate, None, None)[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (2, 1), (1, 2)])
def test_accelerate(ranks: int, stage: int, tmp_path: Path) -> None:
    found = run_ranks(ranks, clients.train_with_accelerate, FOLDER, stage, str(tmp_path / "state"))
    _check(found[0], _accelerate_alone())
