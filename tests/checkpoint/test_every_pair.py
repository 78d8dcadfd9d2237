"""Each layout loads the checkpoints of each other layout bitwise: weights and optimizer state.

All ordered pairs with WHOLE_MATRIX=1; otherwise a ring through some layouts, so that each saves and loads once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import groupby, pairwise, product
from pathlib import Path

import pytest

from megatron_core import parallel_state
from megatron_core.planner.layout import Layout
from megatron_core.verify.ranks import run_ranks
from tests.checkpoint.runs import MODERN, compare, save_run, start, stored, train
from tests.parity.moe_rows import DEEPSEEK
from tests.sample import WHOLE_MATRIX

MODEL = MODERN | DEEPSEEK
MODEL |= {"num_layers": 4, "moe_layer_freq": (0, 1, 1, 1), "moe_ffn_hidden_size": 8, "qk_layernorm": False}
MODEL |= {"global_batch_size": 8}
PRECISIONS = {"fp64": {}, "bf16": {"fp64": False, "bf16": True}}


def padded(multiple: int) -> dict[str, int]:
    """Number of rows of the vocabulary, without padding 101."""
    return {"make_vocab_size_divisible_by": multiple}


# Settings in addition to the layout.
LAYOUTS: dict[str, dict[str, object]] = {
    "1 process": padded(1),
    "dp2 zero1": {},
    "dp2 ep2 zero2": padded(128),
    "tp2": padded(64),
    "tp2 ep2 etp1 sp zero1": {},
    "pp3": {},
    "dp4 zero3": padded(32),
    "dp4 zero1 overlap": {"num_distributed_optimizer_instances": 2, "ddp_bucket_size": 3000},
    "dp4 zero3 overlap": {"num_distributed_optimizer_instances": 2},
    "dp4 ep4 zero2": {},
    "cp2 dp2 zero1": {},
    "tp2 cp2": padded(7),
    "pp2 v2 dp2": {},
    "pp2 dp2 ep2 zb_v zero3": padded(16),
    "tp4": padded(1),
    "pp4 zb_h1": {},
    "tp2 pp3": padded(3),
    "tp2 pp2 v2 dp2 ep2 etp1 sp zero1 overlap": {},
    "dp8 ep8 zero3": padded(5),
    "tp2 cp2 pp2": {},
}
Pair = tuple[str, str]


def ring() -> list[Pair]:
    """Neighbouring pairs of a ring through one layout per world size."""
    chance = random.Random(23)
    by_world = {size: list(names) for size, names in groupby(sorted(LAYOUTS, key=world), key=world)}
    drawn = [chance.choice(names) for names in by_world.values()]
    chance.shuffle(drawn)
    return list(pairwise([*drawn, drawn[0]]))


def world(name: str) -> int:
    """Number of ranks of a layout."""
    return Layout.parse(name).world_size


PAIRS = list(product(LAYOUTS, repeat=2)) if WHOLE_MATRIX else ring()


@pytest.fixture(autouse=True)
def _no_layout_stays() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()


def _settings(name: str, precision: str) -> dict[str, object]:
    return MODEL | PRECISIONS[precision] | Layout.parse(name).settings() | LAYOUTS[name]


def _save(names: list[str], precision: str, root: Path) -> None:
    for name in names:
        run = start(_settings(name, precision) | {"save": str(root / name)})
        train(run, 1)
        save_run(run)


def _load(pairs: list[Pair], precision: str, root: Path) -> list[set[str]]:
    """Names of the tensors compared by this rank, for each pair."""
    found = []
    for saver, loader in pairs:
        run = start(_settings(loader, precision) | {"load": str(root / saver)})
        assert (run.state.iteration, run.optimizer.steps_taken) == (1, 1)
        try:
            found.append(compare(run, stored(root / saver / "iter_0000001")))
        except AssertionError as error:
            raise AssertionError(f"{saver} -> {loader}: {error}") from None
    return found


def test_the_list_is_wide_enough() -> None:
    sizes = {world(name) for name in LAYOUTS}
    assert len(LAYOUTS) >= 14 and {1, 2, 4, 8} < sizes
    assert {Layout.parse(name).zero_stage for name in LAYOUTS} == {0, 1, 2, 3}
    assert {world(name) for pair in ring() for name in pair} == sizes


@pytest.mark.parametrize("precision", PRECISIONS if WHOLE_MATRIX else ["fp64"])
def test_each_layout_loads_what_others_saved(precision: str, tmp_path: Path) -> None:  # C28 C31 C42
    savers = sorted({saver for saver, _ in PAIRS}, key=world)
    for size, names in groupby(savers, key=world):
        run_ranks(size, _save, list(names), precision, tmp_path, timeout=600.0)
    expected = stored(tmp_path / savers[0] / "iter_0000001").keys()
    by_loader = sorted(PAIRS, key=lambda pair: world(pair[1]))
    for size, group in groupby(by_loader, key=lambda pair: world(pair[1])):
        pairs = list(group)
        ranks = run_ranks(size, _load, pairs, precision, tmp_path, timeout=3600.0)
        for pair, *seen in zip(pairs, *ranks, strict=True):
            assert set.union(*seen) == expected, pair
