"""Descriptions of layouts."""

from __future__ import annotations

import pytest

from megatron_core.config import ParallelConfig, RunConfig
from megatron_core.config.rule_helpers import divisors
from megatron_core.errors import LayoutError
from megatron_core.planner.layout import Layout
from megatron_core.verify.comparison import every_layout


@pytest.mark.parametrize(
    "text", ["1 process", "tp2", "tp2 sp", "pp2 v2", "dp4 zero3 overlap", "tp2 cp2 pp2 v3 dp2 sp zero1 overlap"]
)
def test_words_there_and_back(text: str) -> None:
    assert str(Layout.parse(text)) == text


def test_order_of_words_does_not_matter() -> None:
    assert Layout.parse("sp dp2 tp4") == Layout(tp=4, dp=2, sequence_parallel=True)
    assert Layout.parse("tp1 pp1") == Layout.parse("")


@pytest.mark.parametrize("text", ["tp", "tp0", "tpx", "cp", "tp2 tp2", "sp sp", "2", "zero4"])
def test_other_words_are_refused_with_the_legal_ones(text: str) -> None:
    with pytest.raises(LayoutError, match=r"tpN, cpN, ppN, vN, dpN, epN, etpN, sp, zero1, zero2, zero3, overlap"):
        Layout.parse(text)


def test_settings_describe_the_layout() -> None:
    for layout in every_layout(8, 8):
        parallel = RunConfig.from_flat(layout.settings()).parallel
        assert Layout.of(parallel, 8, layout.world_size) == layout


def test_every_layout_of_four_ranks_by_hand() -> None:
    found = {str(layout) for layout in every_layout(4, 4)}
    data_parallel = {
        f"{stage}{overlap}" for stage in ("", " zero1", " zero2", " zero3") for overlap in ("", " overlap")
    }
    context_parallel = {"", " zero1 overlap", " zero3"}
    assert found == {
        *("tp4", "tp4 sp", "pp4"),
        *(f"tp2 pp2{chunks}{sp}" for chunks in ("", " v2") for sp in ("", " sp")),
        *(f"tp2 dp2{sp}{rest}" for sp in ("", " sp") for rest in data_parallel),
        *(f"pp2{chunks} dp2{rest}" for chunks in ("", " v2") for rest in data_parallel),
        *(f"dp4{rest}" for rest in data_parallel),
        *(f"tp2 cp2{sp}{rest}" for sp in ("", " sp") for rest in context_parallel),
        *(f"cp2 pp2{chunks}{rest}" for chunks in ("", " v2") for rest in context_parallel),
        *(f"{words}{rest}" for words in ("cp2 dp2", "cp4") for rest in context_parallel),
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 12])
def test_every_layout_fills_the_world_once(world_size: int) -> None:
    layouts = list(every_layout(world_size, 12))
    assert len(set(layouts)) == len(layouts) > 0
    assert {layout.world_size for layout in layouts} == {world_size}
    assert max(layout.pp * layout.chunks for layout in layouts) <= 12


@pytest.mark.parametrize("number", [0, 1, 12, 36, 97, 1024])
def test_divisors(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_divisors_of_a_slip_of_the_keyboard_are_found_at_once() -> None:
    found = divisors(10**15)
    assert found[:3] == [1, 2, 4] and found[-1] == 10**15


def test_the_least_ranks_have_room_for_all_experts() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "expert_model_parallel_size": 8}
    assert ParallelConfig(**sizes, expert_tensor_parallel_size=1).smallest_world_size == 24
    assert ParallelConfig(tensor_model_parallel_size=4).smallest_world_size == 4
    assert ParallelConfig(tensor_model_parallel_size=0).smallest_world_size == 1
