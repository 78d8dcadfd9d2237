"""Large worlds: a layout of 64 ranks computes what one process does, and defects that smaller worlds hide are found."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_core.config import RunConfig
from megatron_core.planner.layout import Layout
from megatron_core.verify import GPTExperiment, RankFailure, Trace, assemble, run_ranks, shrunk
from megatron_core.verify.bounds import Bounds
from megatron_core.verify.ranks import run_simulated
from tests.defects.in_worlds import EXPERTS, IN_WORLDS, WorldDefect
from tests.defects.plant import planted
from tests.parity.test_matrix import faults

MODEL = {"num_layers": 4, "num_attention_heads": 8, "hidden_size": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}


@cache
def healthy(text: str, flags: tuple[tuple[str, object], ...]) -> tuple[GPTExperiment, Layout, Trace]:
    """Two steps under a layout, and one process's results."""
    layout = Layout.parse(text)
    config = shrunk(RunConfig.from_flat(MODEL | dict(flags)), [layout])
    own = {name: value for name, value in flags if name == "num_distributed_optimizer_instances"}
    experiment = GPTExperiment(config, 2, True, own)
    return experiment, layout, assemble(run_ranks(1, experiment, Layout(), "float64"))


def symptoms(text: str, flags: dict[str, object], defect: WorldDefect | None = None) -> list[str]:
    """Differences from one process, or the message with which the world ends."""
    experiment, layout, baseline = healthy(text, tuple(flags.items()))  # before anything is planted
    try:
        if defect is None:
            found = run_simulated(layout.world_size, experiment, layout, "float64", finish=assemble).result
        else:
            with planted(defect.target, defect.patch):
                found = run_simulated(layout.world_size, experiment, layout, "float64", finish=assemble).result
    except RankFailure as failure:
        return [str(failure).strip().splitlines()[-1]]
    return faults(found, baseline, Bounds("float64"))


@pytest.mark.drawn(0)
def test_64_ranks_compute_what_one_process_computes() -> None:
    """Every axis, chunks, experts over two axes, sharding and overlap."""
    assert symptoms("tp2 cp2 pp4 v2 dp4 ep4 sp zero1 overlap", EXPERTS) == []


BY_NAME = {defect.name: defect for defect in IN_WORLDS}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", BY_NAME)
def test_large_worlds_find(name: str, record_property) -> None:
    defect = BY_NAME[name]
    record_property("defect", name)
    assert Layout.parse(defect.small).world_size <= 8 < 64 <= Layout.parse(defect.large).world_size
    assert symptoms(defect.small, defect.flags, defect) == [], "a small world shows it, too"
    found = symptoms(defect.large, defect.flags, defect)
    assert found, f"{defect.large} holds in spite of it"
    record_property("given away by", found[0])


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", BY_NAME)
def test_large_worlds_hold_without_defects(name: str) -> None:
    assert symptoms(BY_NAME[name].large, BY_NAME[name].flags) == []
