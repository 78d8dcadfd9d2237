"""Published steps are predicted, held-out ones as well as fitted ones."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from benchmarks.bench_planner import correlation, errors, published_steps
from megatron_core.config import RunConfig
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.validate import problems, without_data
from megatron_core.parallel.grid import DENSE_AXES, EXPERT_AXES, Grid
from megatron_core.planner.hardware import GroupBandwidth, Rings, read_hardware
from megatron_core.planner.layer_time import ATTENTION_EDGE, LayerClock
from tests.sample import WHOLE_MATRIX

STEPS = [step for step in published_steps() if step.comparable]
QUICK = [step for step in STEPS if step.config.parallel.pipeline_model_parallel_size <= 8]


def test_every_row_is_a_run_that_could_start() -> None:
    assert len(STEPS) >= 80 and len({step.table for step in STEPS}) >= 10
    for step in STEPS if WHOLE_MATRIX else QUICK[::4]:
        assert not list(problems(without_data(step.config), step.world_size)), step.id


@pytest.mark.parametrize("half", [0, 1], ids=["fitted", "judged"])
def test_errors(half: int) -> None:
    """Mean at most 10 %, worst at most 25 %; docs/planner.md has all rows."""
    chosen = [step for step in (STEPS if WHOLE_MATRIX else QUICK) if step.half == half and not step.blind]
    found = errors(chosen)
    assert statistics.mean(abs(error) for _, error in found) <= 0.1
    for step, error in found:
        assert abs(error) <= 0.25, step.id


def test_errors_of_blind_tables() -> None:
    """Tables without fitted rows: mean at most 10 %, on A100 at most 6 % and worst 15 %. B200, for which nothing was
    fitted, and single rows on H100 are worse (docs/planner.md)."""
    found = errors([step for step in (STEPS if WHOLE_MATRIX else QUICK) if step.blind])
    known = [(step, error) for step, error in found if step.hardware != "b200"]
    assert len(known) >= 60 and statistics.mean(abs(error) for _, error in known) <= 0.1
    ampere = [abs(error) for step, error in known if step.hardware == "a100"]
    assert statistics.mean(ampere) <= 0.06 and max(ampere) <= 0.15


def test_collectives_by_hand() -> None:
    """16 adjacent ranks on 2 nodes send through all 8 links of a node; at a distance of 8 each uses only its own."""
    machine = read_hardware("h100")
    side_by_side, apart = GroupBandwidth.of(machine, 16, 1), GroupBandwidth.of(machine, 16, 8)
    assert (side_by_side.local, apart.local) == (8, 1)
    assert side_by_side.bandwidth == min(8 * machine.inter.bandwidth, machine.intra.bandwidth)
    assert apart.gather(1e9) == pytest.approx(15 / 16 * 1e9 / machine.inter.bandwidth + 4 * machine.inter.latency)
    assert apart.reduce(1e9) == 2 * apart.gather(1e9)
    assert GroupBandwidth.of(machine, 1, 1).gather(1e9) == GroupBandwidth.of(machine, 1, 1).all_to_all(1e9) == 0.0
    leaves = side_by_side.all_to_all(1e9) - 4 * machine.inter.latency
    assert leaves == pytest.approx(1e9 * 8 / 16 / machine.inter.bandwidth)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "dp-cp-ep-tp-pp", "tp-cp-dp-ep-pp", "tp-dp-ep-cp-pp"])
@pytest.mark.parametrize("sizes", [(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 1, 4), (1, 1, 2, 2), (2, 2, 2, 1)])
@pytest.mark.parametrize("per_node", [2, 4])
def test_members_of_groups_on_a_node(order: str, sizes: tuple[int, int, int, int], per_node: int) -> None:
    """Each group has the members on the first node that the grid of the ranks has, in every order."""
    tp, cp, pp, ep = sizes
    grid = Grid.fit(8, tp=tp, cp=cp, pp=pp, ep=ep, etp=1, order=order)
    names = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")
    settings = {f"{name}_parallel_size": size for name, size in zip(names, (*sizes, 1), strict=True)}
    parallel = ParallelConfig(**settings, rank_order=order)
    rings = Rings(replace(read_hardware("h100"), devices_per_node=per_node), parallel, 8)
    for axes in (("tp",), ("cp",), ("dp",), ("pp",), ("ep",), ("etp", "ep"), ("edp",)):
        view = EXPERT_AXES if {"ep", "edp"} & set(axes) else DENSE_AXES
        places = [grid.coordinates(rank) for rank in range(8)]
        members = [
            rank for rank, place in enumerate(places) if all(place[axis] == 0 for axis in view if axis not in axes)
        ]
        ring = rings.ring(*axes)
        assert (ring.size, ring.local) == (len(members), sum(rank < per_node for rank in members)), axes


# Causal attention with heads of 128 channels, TFLOP/s at 512, 2,048 and 16,384 tokens: FlashAttention 2 on A100 and
# H100, forward and backward (its repository's assets), FlashAttention 3 and cuDNN on H100, forward (flash-attention
# 0251105a, flash3_fp16_fwd.png).
ATTENTION = {
    "A100, FlashAttention 2": (99, 155, 189),
    "H100, FlashAttention 2": (163, 265, 328),
    "H100, FlashAttention 3": (292, 521, 616),
    "H100, cuDNN": (315, 484, 539),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_short_sequences(name: str) -> None:
    """The slowdown of FLOPs of short sequences relative to long ones."""
    rates = ATTENTION[name]

    def overhead(length: int) -> float:
        return 1 + ATTENTION_EDGE / ((length + 1) / 2)

    for length, rate in zip((512, 2048), rates, strict=False):
        assert overhead(length) / overhead(16384) == pytest.approx(rates[-1] / rate, rel=0.12)


@pytest.mark.parametrize(("recipe", "both"), [("delayed", 4), ("blockwise", 4), ("tensorwise", 6)])
def test_casts_by_hand(recipe: str, both: int) -> None:
    """Bytes per element: read in 16 bits, twice if its maximum must be computed first, and written twice in 8 bits."""
    settings = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": recipe}
    machine = read_hardware("h100")
    clock = LayerClock(RunConfig.from_flat(settings), machine, 1, 512)
    rows, inputs, outputs = 64, 32, 128
    moved = [seconds * machine.memory_bandwidth for seconds in clock.casts(rows, inputs, outputs)]
    assert moved == pytest.approx([both * (rows * inputs + inputs * outputs), both * rows * outputs, 0.0])


def test_what_overlaps_by_hand() -> None:
    machine = replace(read_hardware("h100"), overlap=0.75)
    clock = LayerClock(RunConfig.from_flat({"bf16": True}), machine, 1, 512)
    assert clock.exposed(2.0, 8.0) == 0.5, "what communication takes from the computation that it overlaps"
    assert clock.exposed(8.0, 2.0) == 6.5


def test_rank_correlation() -> None:
    assert correlation([(1.0, 10.0), (2.0, 20.0), (3.0, 30.0)]) == pytest.approx(1.0)
    assert correlation([(1.0, 30.0), (2.0, 20.0), (3.0, 10.0)]) == pytest.approx(-1.0)
