"""``--record-hashes`` in runs: records that do not depend on the layout, and the hash of a checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from megatron_core.reports.hash_records import first_hash_difference, read_hashes
from megatron_core.training.loop import train
from megatron_core.verify.ranks import run_ranks
from tests.programs import run_program
from tests.runs import tiny_run

SETTINGS = {"record_hashes": True, "record_hashes_by_tensor": True, "eval_iters": 0, "global_batch_size": 4}
UNTIED = {"untie_embeddings_and_output_weights": True, "clip_grad": 0.0}
PP = "pipeline_model_parallel_size"
inspect = partial(run_program, "tools/inspect_checkpoint.py")


def run(folder: Path, **settings: object) -> None:
    train(tiny_run(**{**SETTINGS, "save": str(folder)} | settings), [])


def hash_of(folder: Path) -> list[str]:
    """The hashes that the tool prints, without the folder."""
    found = inspect(folder, "--hash")
    assert found.returncode == 0, found.stderr
    return [line.split()[0] for line in found.stdout.splitlines()]


def test_two_layouts_record_the_same_hashes(tmp_path: Path) -> None:
    """Pipeline stages change no sum except the norm, which without clipping changes no weight."""
    run(tmp_path / "one", train_iters=3, **UNTIED)
    run_ranks(2, partial(run, tmp_path / "pp2", train_iters=3, **UNTIED, **{PP: 2}))
    one, two = read_hashes(tmp_path / "one"), read_hashes(tmp_path / "pp2")
    assert [record.iteration for record in one] == [record.iteration for record in two] == [0, 1, 2, 3]
    assert [(r.gradients, r.weights, r.optimizer) for r in one] == [(r.gradients, r.weights, r.optimizer) for r in two]
    assert len({record.weights for record in one}) > 2
    # The checkpoints have the hash of the last record, in both layouts.
    assert hash_of(tmp_path / "one") == hash_of(tmp_path / "pp2")
    assert hash_of(tmp_path / "one")[1:] == [one[-1].weights, one[-1].optimizer]


def test_an_interval_selects_the_same_records(tmp_path: Path) -> None:
    run(tmp_path / "all", train_iters=4)
    run(tmp_path / "some", train_iters=4, record_hashes_interval=2, record_hashes_by_tensor=False)
    every, some = read_hashes(tmp_path / "all"), read_hashes(tmp_path / "some")
    assert [record.iteration for record in some] == [0, 2, 4]
    assert not any(record.by_tensor for record in some)
    assert first_hash_difference(every, some) is None


def test_a_changed_run_is_found(tmp_path: Path) -> None:
    run(tmp_path / "one", train_iters=2)
    run(tmp_path / "other", train_iters=2, weight_decay=0.02)
    found = first_hash_difference(read_hashes(tmp_path / "one"), read_hashes(tmp_path / "other"))
    assert found is not None and (found.iteration, found.quantity) == (1, "weights")


INVARIANT = {"layout_invariant": True, "hidden_dropout": 0.1, "attention_dropout": 0.1}
ZERO1, TP, MICRO_BATCHES = (
    {"use_distributed_optimizer": True},
    {"tensor_model_parallel_size": 2},
    {"micro_batch_size": 1},
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("model", "ranks", "first", "then"),
    [
        pytest.param(UNTIED, 1, {}, {PP: 2}, id="pp2"),
        pytest.param(INVARIANT, 2, ZERO1, TP, id="dp2 zero1, tp2, invariant"),
        pytest.param(
            INVARIANT | {"bf16": True}, 1, MICRO_BATCHES, ZERO1, id="micro-batches, dp2 zero1, invariant bfloat16"
        ),
    ],
)
def test_a_change_of_the_layout_leaves_no_trace(
    model: dict, ranks: int, first: dict, then: dict, tmp_path: Path
) -> None:
    """Six steps in one process, and three in one layout and three in another one after a resume."""
    train_in = partial(run, tmp_path / "parts", train_iters=6, **model)
    run_ranks(1, partial(run, tmp_path / "whole", train_iters=6, **model))
    run_ranks(ranks, partial(train_in, exit_interval=3, **first))
    run_ranks(2, partial(train_in, load=str(tmp_path / "parts"), **then))
    whole, parts = read_hashes(tmp_path / "whole"), read_hashes(tmp_path / "parts")
    assert [record.iteration for record in parts] == list(range(7))
    assert [(r.gradients, r.weights, r.optimizer) for r in whole] == [
        (r.gradients, r.weights, r.optimizer) for r in parts
    ]
    assert hash_of(tmp_path / "whole") == hash_of(tmp_path / "parts")
    if "layout_invariant" in model:
        assert first_hash_difference(whole, parts) is None  # losses and norms, too
