"""Transformers models of images and text in parallel layouts against the unmodified model in one process."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

import megatron_core
from megatron_core.errors import ConfigError, MegatronError
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.any_model.image_text_models import CLASSIFIERS, MODELS, model_of, train_with_engine, train_with_torch
from tests.any_model.models import COMMON, Result, difference
from tests.defects.plant import planted

PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, {"zero_stage": 1, "overlap_grad_reduce": True}),
    (2, {"zero_stage": 3}),
    (2, TP2),
    (2, PP2),
    (4, {"zero_stage": 2}),
    (2, {"zero_stage": 3, "recompute_granularity": "full"}),
    (4, {**TP2, "zero_stage": 3}),
    (4, {**PP2, "zero_stage": 3}),
    (4, {**TP2, **PP2}),
]
NAMED = ("qwen3-vl", "gemma3", "llama4")
"""Models that run in all rows; others run in the first four."""
CASES = [
    (name, row, (number + row) % 2 == 0)
    for number, name in enumerate(MODELS)
    for row in range(len(ROWS))
    if name in NAMED or (row < 4 and (name != "mllama" or row in (0, 2)))
]


@cache
def _reference(name: str, frozen: bool) -> Result:
    return train_with_torch(name, frozen=frozen)


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("name", "row", "frozen"), CASES)
def test_equals_transformers(name: str, row: int, frozen: bool) -> None:
    ranks, settings = ROWS[row]
    expected = _reference(name, frozen)
    for result in run_ranks(ranks, partial(train_with_engine, name, settings, frozen=frozen)):
        assert difference(result, expected) < 1e-10


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_masks_with_an_entry_for_each_head(name: str) -> None:
    for result in run_ranks(2, train_with_engine, name, TP2):
        assert difference(result, _reference(name, False)) < 1e-10


def test_layers_that_some_micro_batches_leave_out() -> None:
    """Without images the layers of Mllama that attend to them do not run, so they cannot be units of ZeRO 3."""
    classes = ["MllamaForConditionalGeneration"]
    expected = _reference("mllama", False)
    for result in run_ranks(2, partial(train_with_engine, "mllama", {"zero_stage": 3}, unit_classes=classes)):
        assert difference(result, expected) < 1e-10


def test_code_after_a_cut_layer_runs_once() -> None:
    """Qwen3-VL adds features of images after the last layer of a stage; the next stage, without them, must not."""
    with (
        planted("any_model.cut:ModelCut._changed_output", "return inputs[0]", "return None"),
        pytest.raises(
            RankFailure, match=r"language_model\.layers\.2 of Qwen3VLFor\w* reads values that only the first"
        ),
    ):
        run_ranks(2, train_with_engine, "qwen3-vl", PP2)


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "qwen3-vl": (
        *(4, {"pipeline_model_parallel_size": 4}),
        "model.language_model.layers.2 of Qwen3VLForConditionalGeneration reads values that only the first stage",
    ),
    "mllama": (2, PP2, "model.language_model.layers.1 does not run in each forward of MllamaForConditionalGeneration"),
    "llama4": (2, {"expert_model_parallel_size": 2}, "its forward takes (hidden_states)"),
    "gemma3": (2, {"context_parallel_size": 2}, "joins features of images, video or audio with the tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_a_model_cannot_have(name: str) -> None:
    ranks, settings, message = REFUSED[name]
    for text in run_ranks(ranks, _refused, name, settings):
        assert message in text


def _refused(name: str, settings: dict[str, Any]) -> str:
    with pytest.raises(MegatronError) as error:
        train_with_engine(name, settings)
    return str(error.value)


def test_packed_rowwise_is_a_style_of_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="packed_rowwise, which is for parameters; use rowwise"):
        megatron_core.parallelize(model, 1, plan={"0": "colwise", "1": "packed_rowwise"})


def _shards() -> dict[str, tuple[int, ...]]:
    engine = megatron_core.initialize(model_of("qwen3-vl"), {**COMMON, **TP2}).engine
    return {name: tuple(p.shape) for name, p in engine.module.model.language_model.layers[0].named_parameters()}


def test_rules_split_layers_that_the_plan_of_a_model_leaves_out() -> None:
    whole = dict(model_of("qwen3-vl").model.language_model.layers[0].named_parameters())
    for shapes in run_ranks(2, _shards):
        split = {name for name, shape in shapes.items() if torch.Size(shape) != whole[name].shape}
        assert split == {name for name, p in whole.items() if p.dim() > 1}
