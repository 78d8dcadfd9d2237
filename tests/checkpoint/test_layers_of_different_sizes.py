"""Checkpoints of models with layers of different sizes load into any layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError
from megatron_core.features.layer_sizes.settings import LAYERS_JSON, write_blocks
from megatron_core.training.compatibility import check_same_model
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import MODERN, compare, save_run, start, stored, train
from tests.parity.heterogeneous_rows import BLOCKS, LAYERS, PP2, SP, TP2, TP4, ZERO3

MODEL = MODERN | LAYERS | {"global_batch_size": 4}
LAYOUTS: dict[str, tuple[int, dict]] = {"tp2 pp2 sp": (4, TP2 | PP2 | SP), "tp4": (4, TP4), "dp2 zero3": (2, ZERO3)}


def _save(layout: str, folder: Path) -> list[tuple[float, float]]:
    run = start(MODEL | LAYOUTS[layout][1] | {"save": str(folder)})
    train(run, 3)
    save_run(run)
    return train(run, 2)


def _load(layout: str, folder: Path) -> tuple[set[str], list[tuple[float, float]]]:
    run = start(MODEL | LAYOUTS[layout][1] | {"load": str(folder)})
    return compare(run, stored(folder / "iter_0000003")), train(run, 2)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("saver", "loader"), [("tp2 pp2 sp", "dp2 zero3"), ("dp2 zero3", "tp4"), ("tp4", "tp2 pp2 sp")]
)
def test_any_layout_loads_any_other(saver: str, loader: str, tmp_path: Path) -> None:
    expected = run_ranks(LAYOUTS[saver][0], _save, saver, tmp_path)[0]
    tensors = stored(tmp_path / "iter_0000003")
    assert {"model.decoder.layers.1.mlp.weight", "model.decoder.layers.2.self_attention.weight"} <= tensors.keys()
    assert not any(".layers.3." in name for name in tensors)
    results = run_ranks(LAYOUTS[loader][0], _load, loader, tmp_path)
    assert set.union(*(seen for seen, _ in results)) == tensors.keys()
    np.testing.assert_allclose(results[0][1], expected, rtol=1e-9)


def test_sizes_of_a_resumed_run_are_compared_and_not_their_text() -> None:
    config = RunConfig.from_flat(MODEL)
    sizes = write_blocks(config.model.sized_blocks)
    assert sizes != config.model.heterogeneous_layers_config_encoded_json
    check_same_model(config.flat() | {LAYERS_JSON: sizes.replace("{", "{ ")}, config)
    other = write_blocks((*BLOCKS[:1], *reversed(BLOCKS[1:])))
    with pytest.raises(
        CheckpointError, match=r"other sizes than the checkpoint in block_configs 1, 2, 3, 4\n"
    ) as error:
        check_same_model(config.flat() | {LAYERS_JSON: other}, config)
    assert "{" not in str(error.value)
    with pytest.raises(CheckpointError, match=f"trained with {LAYERS_JSON}=None"):
        check_same_model(config.flat() | {LAYERS_JSON: None}, config)
