"""The Trainer of transformers and accelerate over the drop-in.

They are compared with the same programs over DeepSpeed itself, or without DeepSpeed in one process.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_core.drop_in import FOLDER
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed import clients
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

FLOAT32 = 2e-5
"""Bound on relative differences of losses and norms and on differences of weights: 6 to 8 steps in float32."""
BFLOAT16 = 2e-3
"""The same in bfloat16, whose losses the Trainer rounds: half a unit in the last place is 4e-3 of the loss."""


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """Import transformers and accelerate once, for all forked ranks."""
    clients.load()


def _check(found: dict[str, Any], expected: dict[str, Any], bound: float = FLOAT32) -> None:
    for name in ("losses", "norms", "rates", "eval"):
        np.testing.assert_allclose(found.get(name, []), expected.get(name, []), rtol=bound, atol=1e-7, err_msg=name)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in found["weights"].items():
        np.testing.assert_allclose(weights, expected["weights"][name], atol=20 * bound, err_msg=name)


@pytest.fixture(scope="module")
def model(loaded: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a saved model."""
    folder = str(tmp_path_factory.mktemp("model"))
    clients.save_model(folder)
    return folder


@cache
def _trainer_alone(model: str) -> dict[str, Any]:
    return run_ranks(1, clients.train_with_trainer, None, model, f"{model}/alone", None)[0]


@cache
def _accelerate_alone(model: str) -> dict[str, Any]:
    return run_ranks(1, clients.train_with_accelerate, None, model, None)[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("ranks", "stage", "recomputes"),
    [(2, 3, True), (1, 1, False), (2, 3, False)],
    ids=["zero3-recomputation", "one-rank-zero1", "zero3"],
)
def test_trainer_equals_training_without_deepspeed(
    ranks: int, stage: int, recomputes: bool, model: str, tmp_path: Path
) -> None:
    """The Trainer makes optimizer and scheduler; at stage 3 training also resumes in the middle."""
    alone, arguments = _trainer_alone(model), (str(FOLDER), model, str(tmp_path), clients.json_of(stage))
    found = run_ranks(ranks, clients.train_with_trainer, *arguments, None, recomputes)
    _check(found[0], alone)
    assert (found[0]["recomputed"] > 0) == recomputes
    if stage == 3:
        (tmp_path / "final" / "model.safetensors").unlink()
        resumed = run_ranks(ranks, clients.train_with_trainer, *arguments, 3, recomputes)
        _check(resumed[0], alone)


def test_prompts_that_the_trainer_saves_on_one_rank(model: str, tmp_path: Path) -> None:
    """peft computes the prompts for the file, by an encoder whose weights are in shards."""
    expected = run_ranks(1, clients.train_prompts, None, model, str(tmp_path), None)[0]
    found = run_ranks(2, clients.train_prompts, str(FOLDER), model, str(tmp_path), clients.json_of(3))[0]
    np.testing.assert_allclose(found, expected, atol=20 * FLOAT32)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("ranks", "stage"), [(2, 2), (4, 3)])
def test_trainer_with_split_sequences(ranks: int, stage: int, model: str, tmp_path: Path) -> None:
    """``ParallelismConfig(sp_size=2)``: two ranks share each sequence in training, and none in evaluation."""
    alone = run_ranks(1, clients.train_with_trainer, None, model, str(tmp_path / "alone"), None, None, False, 1)[0]
    config = clients.json_of(stage)
    split = run_ranks(ranks, clients.train_with_trainer, str(FOLDER), model, str(tmp_path), config, None, False, 2)
    _check(split[0], alone)


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("stage", "settings", "bound"),
    [(2, clients.BF16, BFLOAT16), (0, {}, FLOAT32), (1, {}, FLOAT32), (3, {}, FLOAT32)],
    ids=["zero2-bf16", "zero0", "zero1", "zero3"],
)
def test_trainer_equals_training_with_deepspeed(
    stage: int, settings: dict[str, Any], bound: float, model: str, tmp_path: Path
) -> None:
    """The JSON names optimizer and scheduler with ``auto`` values, which the Trainer fills."""
    config = clients.json_of(stage, **clients.NAMED, **settings)
    arguments = [(str(folder), model, str(tmp_path / folder.name), config) for folder in (FOLDER, REFERENCE)]
    found = run_ranks(2, clients.train_with_trainer, *arguments[0])[0]
    expected = ask(Task("tests.drop_in.deepspeed.clients:train_with_trainer", arguments[1], ranks=2))
    if stage == 0:  # DeepSpeed computes no norm at stage 0 in float32
        expected |= {"norms": found["norms"]}
    _check(found, expected, bound)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (2, 1), (1, 2), (2, 2)])
def test_accelerate(ranks: int, stage: int, model: str, tmp_path: Path) -> None:
    found = run_ranks(ranks, clients.train_with_accelerate, str(FOLDER), model, stage, str(tmp_path / "state"))
    _check(found[0], _accelerate_alone(model))


def test_accelerates_own_fsdp_beside_the_drop_in(model: str) -> None:
    found = run_ranks(2, clients.train_with_accelerate, None, model, "fsdp2", backend="gloo")
    _check(found[0], _accelerate_alone(model))
