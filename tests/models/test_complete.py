"""The stages built by the ranks form one whole model, or the run does not start."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.models.build import EMBEDDING, OUTPUT, faults
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

PP2 = {"num_layers": 4, "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([[EMBEDDING, "layer 0"], ["layer 1", OUTPUT]], []),
        ([["layer 1", OUTPUT], [], [EMBEDDING, "layer 0"]], []),
        ([[EMBEDDING, "layer 0"], [OUTPUT]], ["layer 1 on no rank"]),
        ([[], []], [f"{EMBEDDING}, layer 0, layer 1, {OUTPUT} on no rank"]),
        ([[EMBEDDING, "layer 0", "layer 1"], ["layer 1", OUTPUT]], ["layer 1 on pipeline ranks 0 and 1"]),
        ([[EMBEDDING, "layer 0", "layer 0"], ["layer 1", OUTPUT]], ["layer 0 on pipeline ranks 0 and 0"]),
        ([[EMBEDDING, "layer 0"], ["layer 1", "layer 2", OUTPUT]], ["layer 2 on pipeline rank 1, but num_layers=2"]),
        ([[EMBEDDING, "layer 0", "layer 1"], [EMBEDDING, OUTPUT]], [f"{EMBEDDING} on pipeline ranks 0 and 1"]),
    ],
)
def test_every_part_once(held: list[list[str]], found: list[str]) -> None:  # C34
    assert faults(held, num_layers=2) == found


def _refusal(layouts: list[str]) -> str:
    """The error of a run in which pipeline ranks have different layouts."""
    with pytest.raises(LayoutError) as error:
        tiny_run(**PP2, pipeline_model_parallel_layout=layouts[dist.get_rank()])
    return str(error.value)


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        (["Et|ttL", "Et|ttL"], "layer 3 on no rank"),
        (["Ettt|ttL", "Ettt|ttL"], "layer 4 on pipeline rank 1, but num_layers=4"),
        (["Ettt|tL", "Ett|ttL"], "layer 2 on pipeline ranks 0 and 1"),
        (["Et|tttL", "Ett|ttL"], "layer 1 on no rank"),
    ],
)
def test_all_ranks_refuse_a_model_that_is_not_whole(layouts: list[str], words: str) -> None:  # C34
    first, second = run_ranks(2, _refusal, layouts)
    assert first == second
    assert words in first and "ranks 0, 1" in first
