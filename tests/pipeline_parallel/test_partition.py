"""Every layer is on exactly one stage, in order, and the stages are as even as they go."""

from __future__ import annotations

import pytest

from megatron_core.errors import LayoutError
from megatron_core.pipeline_parallel.actions import placed_round_robin
from megatron_core.pipeline_parallel.partition import describe, partition


@pytest.mark.parametrize("num_layers", range(1, 34))
def test_every_layer_is_there_once(num_layers: int) -> None:  # C34
    for num_stages in range(1, num_layers + 1):
        stages = partition(num_layers, num_stages)
        assert len(stages) == num_stages
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        sizes = [len(stage) for stage in stages]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_left_over_layers_go_to_the_middle() -> None:
    """The first stage has the embedding, the last one the output layer and the loss."""
    sizes = {left: [len(stage) for stage in partition(8 + left, 4)] for left in range(4)}
    assert sizes == {0: [2, 2, 2, 2], 1: [2, 3, 2, 2], 2: [2, 3, 3, 2], 3: [3, 3, 3, 2]}


def test_more_stages_than_layers() -> None:
    with pytest.raises(LayoutError, match=r"num_layers=3 is less than the 4 pipeline stages.*at most 3"):
        partition(3, 4)


def test_description() -> None:
    assert describe(partition(5, 4), placed_round_robin(2, 2)).splitlines() == [
        "pipeline rank 0: embedding, layer 0 | layer 3",
        "pipeline rank 1: layers 1-2 | layer 4, output",
    ]
    assert describe(partition(3, 1), (0,)) == "pipeline rank 0: embedding, layers 0-2, output"
