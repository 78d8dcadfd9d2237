"""Megatron Core's ``PipelineParallelLayerLayout``: names, arguments and meaning."""

from __future__ import annotations

import re

import pytest

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron_core import parallel_state
from megatron_core.config import ParallelConfig
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.verify.ranks import run_ranks, this_world

DEEPSEEK = "Et*3|(tt|)*29,m|L"
E, T, L = LayerType.embedding, LayerType.decoder, LayerType.loss


def test_layers_by_rank_and_chunk() -> None:
    """Megatron's own example: 61 layers and a prediction layer over 16 ranks with two chunks each."""
    layout = PipelineParallelLayerLayout.from_str(DEEPSEEK, 16)
    assert (layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size) == (16, 2)
    assert layout.layout[0] == [[E, T, T, T], [T, T]]
    assert layout.layout[14] == [[T, T], [LayerType.mtp]]
    assert layout.layout[15] == [[T, T], [L]]
    assert layout.flatten_layout.count(T) == 61
    assert PipelineParallelLayerLayout.get_num_stages_from_str(DEEPSEEK) == 32
    assert repr(layout) == DEEPSEEK
    layout.validate_layer_layout(num_layers=61, mtp_num_layers=1)


def test_numbers_of_layers() -> None:  # C34
    layout = PipelineParallelLayerLayout("Ettt|t||tL", 2)
    places = [(rank, chunk) for chunk in range(2) for rank in range(2)]
    numbers = [layout.get_layer_id_list(vp_stage=chunk, pp_rank=rank) for rank, chunk in places]
    assert numbers == [[0, 1, 2], [3], [], [4]]
    assert [layout.get_layer_offset(vp_stage=chunk, pp_rank=rank) for rank, chunk in places] == [0, 3, 4, 4]
    assert [layout.get_num_layers_to_build(vp_stage=c, pp_rank=r) for r, c in places] == [3, 1, 0, 1]
    assert layout.get_num_layers_to_build(L, vp_stage=1, pp_rank=1) == 1
    assert layout.get_layer_id_list(E, vp_stage=0, pp_rank=0) == [0]


def test_a_list_says_the_same_as_a_text() -> None:
    stages = [["embedding", "decoder", T], [" Decoder", L]]
    layout = PipelineParallelLayerLayout(stages, 2)
    assert layout.layout == PipelineParallelLayerLayout("Ett|tL", 2).layout
    assert stages[1] == [" Decoder", L]
    assert PipelineParallelLayerLayout.parse_str_to_list("Ett|tL") == [[E, T, T], [T, L]]


def _own_layers() -> list[int]:
    parallel_state.make_groups(ParallelConfig(pipeline_model_parallel_size=2), this_world())
    return PipelineParallelLayerLayout("Ettt|tL", 2).get_layer_id_list()


def test_the_rank_is_by_default_that_of_the_process() -> None:
    assert run_ranks(2, _own_layers) == [[0, 1, 2], [3]]


@pytest.mark.parametrize(
    ("text", "num_layers", "words"),
    [
        ("Ett|tL", 4, "it has 3 decoder layers, not 4"),
        ("tEt|tL", 3, "its first layer must be its only embedding, but it has 1"),
        ("Ett|t", 3, "its last layer must be its only loss, but it has 0"),
        ("EtL|tL", 2, "its last layer must be its only loss, but it has 2"),
        ("Ett|mL", 2, "it has 1 mtp layers, not 0"),
        ("|", 2, "its first layer must be its only embedding, but it has 0"),
    ],
)
def test_layouts_that_are_no_model(text: str, num_layers: int, words: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(words)):
        PipelineParallelLayerLayout(text, 2).validate_layer_layout(num_layers)


def test_what_cannot_be_made() -> None:
    with pytest.raises(LayoutError, match=r"3 stages cannot be split over pipeline_model_parallel_size=2"):
        PipelineParallelLayerLayout("E|t|L", 2)
    with pytest.raises(ConfigError, match="'x' at position 2"):
        PipelineParallelLayerLayout("Ex|L", 2)
    with pytest.raises(LayoutError, match=r"'block' is not a type of layer; legal: embedding, loss"):
        PipelineParallelLayerLayout([["embedding", "block"], ["loss"]], 2)
    with pytest.raises(LayoutError, match="the stage 'Et' is a string"):
        PipelineParallelLayerLayout(["Et", "tL"], 2)
    with pytest.raises(LayoutError, match=r"vp_stage=None, but each rank has 2 chunks"):
        PipelineParallelLayerLayout("E|t|t|L", 2).get_layer_offset(pp_rank=0)
