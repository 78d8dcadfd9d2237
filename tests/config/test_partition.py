"""Every layer is on exactly one stage, in order, and the cost of the most expensive stage is minimal."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.config import RunConfig
from megatron_core.config.partition import Ends, describe_stages, layers_by_stage, partition, plan_of
from megatron_core.config.validate import problems
from megatron_core.errors import LayoutError
from megatron_core.schedules import TRAINING
from megatron_core.schedules.actions import round_robin_stages

PAIRED = {"overlap_moe_expert_parallel_comm": True}
WITH_PAIRS = {"1f1b", "interleaved", "dualpipe_v"}
EXPERTS = {"num_experts": 4}


def sizes(stages: list[range]) -> list[int]:
    return [len(stage) for stage in stages]


def loads(stage_sizes: list[int], ends: Ends) -> list[Fraction]:
    """The cost of each stage."""
    costs = [Fraction(size) for size in stage_sizes]
    costs[0] += ends.embedding
    costs[-1] += ends.output
    return costs


def every_split(num_layers: int, num_stages: int, ends: Ends) -> list[list[int]]:
    """All splits into runs of at least one layer; an end that counts as a layer may have no layer."""
    low, high = int(ends.as_layers and ends.embedding > 0), int(ends.as_layers and ends.output > 0)
    total = num_layers + low + high
    cuts = [(0, *middle, total) for middle in combinations(range(1, total), num_stages - 1)]
    splits = [[stop - start for start, stop in pairwise(cut)] for cut in cuts]
    for split in splits:
        split[0] -= low
        split[-1] -= high
    return [split for split in splits if min(split) >= 0]


costs = st.fractions(0, 5, max_denominator=4)


@settings(max_examples=300, deadline=None)
@given(
    num_layers=st.integers(1, 9),
    num_stages=st.integers(1, 6),
    ends=st.builds(Ends, embedding=costs, output=costs, as_layers=st.booleans()),
)
def test_no_split_has_a_cheaper_bottleneck(num_layers: int, num_stages: int, ends: Ends) -> None:  # C34
    splits = every_split(num_layers, num_stages, ends)
    if not splits:
        with pytest.raises(LayoutError, match=rf"num_layers={num_layers} is less than one .* {num_stages} pipeline"):
            partition(num_layers, num_stages, ends)
        return
    stages = partition(num_layers, num_stages, ends)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert sizes(stages) in splits
    # Not only the bottleneck is minimal: all costs, sorted in descending order, are.
    assert sorted(loads(sizes(stages), ends), reverse=True) == min(
        sorted(loads(split, ends), reverse=True) for split in splits
    )


@pytest.mark.parametrize("num_layers", range(1, 34))
def test_every_layer_is_there_once(num_layers: int) -> None:  # C34
    for num_stages in range(1, num_layers + 1):
        stages = partition(num_layers, num_stages)
        assert len(stages) == num_stages
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert max(sizes(stages)) - min(sizes(stages)) <= 1
        assert min(sizes(stages)) >= 1


def test_left_over_layers_go_to_the_middle() -> None:
    """The first stage has the embedding, the last stage the output layer and the loss."""
    found = {left: sizes(partition(8 + left, 4)) for left in range(4)}
    assert found == {0: [2, 2, 2, 2], 1: [2, 3, 2, 2], 2: [2, 3, 3, 2], 3: [3, 3, 3, 2]}


def test_an_expensive_output_layer_takes_layers_from_the_last_stage() -> None:
    def split(output: str) -> list[int]:
        return sizes(partition(12, 4, Ends(output=Fraction(output))))

    assert split("0.9") == [3, 3, 3, 3]
    assert split("1") == [3, 4, 3, 2]  # a tie with 3, 3, 3, 3, which the middle stages win
    assert split("1.1") == [3, 4, 3, 2]
    assert split("100") == [3, 4, 4, 1]


def test_more_stages_than_layers() -> None:
    with pytest.raises(LayoutError, match=r"num_layers=3 is less than one for each of the 4 .*at most 3 stages"):
        partition(3, 4)


def by_stage(num_layers: int, num_stages: int, vocab_size: int = 128, **settings: object) -> list[int]:
    """The number of layers on each stage of a configuration."""
    values = {"num_layers": num_layers, "pipeline_model_parallel_size": num_stages} | settings
    config = RunConfig.from_flat(values)
    return sizes(layers_by_stage(config, vocab_size, num_stages * config.parallel.num_chunks(num_layers)))


GPT2 = {"hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024}


def test_the_output_layer_costs_its_flops() -> None:
    """GPT-2 in FLOPs per token: a layer has 24 h^2 + 4 S h = 17,301,504, the output layer 2 h V = 77,194,752: 4.46
    layers."""
    config = RunConfig.from_flat(GPT2 | {"num_layers": 12})
    assert Ends.of(config, 50257) == Ends(output=Fraction(77_194_752, 17_301_504))
    assert by_stage(12, 2, 50257, **GPT2) == [8, 4]
    assert by_stage(12, 4, 50257, **GPT2) == [3, 4, 4, 1]


EMBEDDING = {"account_for_embedding_in_pipeline_split": True}
LOSS = {"account_for_loss_in_pipeline_split": True}
CHUNKS2 = {"num_virtual_stages_per_pipeline_rank": 2}


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "settings", "expected"),
    [
        # modules that count as a layer, independent of FLOPs; Megatron's split if it has one
        (6, 4, EMBEDDING | LOSS, [1, 2, 2, 1]),
        (7, 4, EMBEDDING, [1, 2, 2, 2]),
        (7, 4, LOSS, [2, 2, 2, 1]),
        (6, 2, EMBEDDING | LOSS | CHUNKS2, [1, 2, 2, 1]),
        (6, 2, EMBEDDING | LOSS | {"num_layers_per_virtual_pipeline_stage": 1}, [0, 1, 1, 1, 1, 1, 1, 0]),
        (2, 4, EMBEDDING | LOSS, [0, 1, 1, 0]),
        # chunks with a given number of layers
        (8, 2, {"num_layers_per_virtual_pipeline_stage": 2}, [2, 2, 2, 2]),
        # counts
        (6, 4, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}, [1, 1, 1, 3]),
        (7, 3, {"decoder_first_pipeline_num_layers": 1}, [1, 3, 3]),
        (7, 3, {"decoder_last_pipeline_num_layers": 1}, [3, 3, 1]),
        (5, 2, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 4}, [1, 4]),
        (10, 3, {"decoder_first_pipeline_num_layers": 2, **CHUNKS2}, [1, 2, 2, 1, 2, 2]),
        # a layout
        (5, 2, {"pipeline_model_parallel_layout": "Et*4|tL"}, [4, 1]),
        (4, 2, {"pipeline_model_parallel_layout": "E|tt|tt|L"}, [0, 2, 2, 0]),
    ],
)
def test_settings(num_layers: int, num_stages: int, settings: dict, expected: list[int]) -> None:  # C34
    assert by_stage(num_layers, num_stages, 100_000, **settings) == expected


def test_a_layout_for_another_number_of_stages() -> None:
    config = RunConfig.from_flat({"pipeline_model_parallel_layout": "Et|tL"})
    with pytest.raises(LayoutError, match=r"pipeline_model_parallel_layout=Et\|tL has 2 stages, but there are 4"):
        layers_by_stage(config, 128, 4)


def test_description() -> None:
    assert describe_stages(partition(5, 4), round_robin_stages(2, 2)).splitlines() == [
        "pipeline rank 0: embedding, layer 0 | layer 3",
        "pipeline rank 1: layers 1-2 | layer 4, output",
    ]
    assert describe_stages(partition(3, 1), (0,)) == "pipeline rank 0: embedding, layers 0-2, output"


def test_description_of_stages_without_layers() -> None:
    stages = [range(0), range(0, 2), range(2, 2), range(2, 2), range(2, 3), range(3, 3)]
    assert describe_stages(stages, round_robin_stages(3, 2)).splitlines() == [
        "pipeline rank 0: embedding | empty stage",
        "pipeline rank 1: layers 0-1 | layer 2",
        "pipeline rank 2: empty stage | output",
    ]


@pytest.mark.parametrize("schedule", TRAINING)
def test_every_legal_schedule_has_a_plan(schedule: str) -> None:
    """Without experts the overlap of their exchange has no effect, and no schedule needs pairs."""
    model = {
        "mock_data": True,
        "train_iters": 1,
        "vocab_size": 64,
        "num_layers": 8,
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": schedule,
    }
    chunks = {"num_virtual_stages_per_pipeline_rank": 2} if schedule == "interleaved" else {}
    plans = []
    for more in ({}, PAIRED, PAIRED | EXPERTS, PAIRED | EXPERTS | {"expert_model_parallel_size": 2}):
        config = RunConfig.from_flat(model | chunks | more)
        if not any(problems(config, 4)):
            plans.append(plan_of(config, 4))
    assert plans[0] == plans[1]
    assert (len(plans) == 4) == (schedule in WITH_PAIRS)
