"""Checkpoints with any split of experts load into any other: weights, moments, the router's bias."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.checkpoint.runs import MODERN, compare, save_run, start, stored, train
from tests.defects.plant import planted
from tests.parity.moe_rows import DEEPSEEK, EP2, EP4, ETP1, ETP2, PP2, SP, TP2, ZERO

MODEL = MODERN | DEEPSEEK | {"moe_ffn_hidden_size": 8, "global_batch_size": 4, "qk_layernorm": False}
LAYOUTS: dict[str, tuple[int, dict]] = {
    "1": (1, {}),
    "ep2 etp2": (4, EP2 | ETP2),
    "tp2 sp ep4 etp1 zero1": (4, TP2 | SP | EP4 | ETP1 | ZERO),
    "pp2 ep2": (4, PP2 | EP2),
}
PAIRS = [
    ("1", "ep2 etp2"),
    ("ep2 etp2", "tp2 sp ep4 etp1 zero1"),
    ("tp2 sp ep4 etp1 zero1", "pp2 ep2"),
    ("pp2 ep2", "1"),
]


def _save(layout: str, folder: Path) -> list[tuple[float, float]]:
    """Three steps, a checkpoint, and the results of two more steps."""
    run = start(MODEL | LAYOUTS[layout][1] | {"save": str(folder)})
    train(run, 3)
    save_run(run)
    return train(run, 2)


def _load(layout: str, folder: Path) -> tuple[set[str], list[tuple[float, float]]]:
    run = start(MODEL | LAYOUTS[layout][1] | {"load": str(folder)})
    return compare(run, stored(folder / "iter_0000003")), train(run, 2)


# C28: dropout is on.
@pytest.mark.drawn(2)
@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_any_split_of_experts_loads_any_other(saver: str, loader: str, tmp_path: Path) -> None:
    expected = run_ranks(LAYOUTS[saver][0], _save, saver, tmp_path)[0]
    tensors = stored(tmp_path / "iter_0000003")
    names = {"model.decoder.layers.1.mlp.experts.linear_fc1.weight", "model.decoder.layers.2.mlp.router.expert_bias"}
    assert names <= tensors.keys()
    assert tensors["model.decoder.layers.2.mlp.router.expert_bias"].abs().max() > 0.04  # it has changed
    results = run_ranks(LAYOUTS[loader][0], _load, loader, tmp_path)
    assert set.union(*(seen for seen, _ in results)) == tensors.keys()
    np.testing.assert_allclose(results[0][1], expected, rtol=1e-9)


def test_a_checkpoint_with_the_experts_of_one_rank_is_refused(tmp_path: Path) -> None:
    """A rank other than the first may have the only copy of its experts."""
    target, fragment = "data_parallel.buffer:Bucket.saved_span", "self.dp_group.rank()"
    with (
        planted(target, fragment, "torch.distributed.get_rank()"),
        pytest.raises(RankFailure, match="a rank could not complete a checkpoint"),
    ):
        run_ranks(4, _save, "ep2 etp2", tmp_path)
