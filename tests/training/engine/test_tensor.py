"""Automatic tensor parallelism of models of the caller against torch alone in one process."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_core
from megatron_core.errors import MegatronError
from megatron_core.training.engine import Engine
from megatron_core.verify.ranks import run_ranks
from tests.sample import WHOLE_MATRIX
from tests.training.engine.models import (
    COMMON,
    LLAMA,
    MODELS,
    Result,
    _causal,
    _tokens,
    call,
    difference,
    loss_in,
    model_of,
    samples_of,
    train_with_engine,
    train_with_torch,
    weights_of,
)

TENSOR = {"tensor_model_parallel_size": 2}
ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, TENSOR),
    (4, {**TENSOR, "zero_stage": 1}),
    (4, {**TENSOR, "zero_stage": 3}),
]
NAMES = ("gpt2", "llama", "qwen3", "mixtral", "bert", "vit")


@cache
def _reference(name: str) -> Result:
    return train_with_torch(name)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("name", "row"),
    [(n, r) for i, n in enumerate(NAMES) for r in (range(3) if WHOLE_MATRIX else (0, 1 + i % 2))],
)
def test_equals_torch(name: str, row: int) -> None:
    ranks, settings = ROWS[row]
    for result in run_ranks(ranks, _train, name, settings):
        assert difference(result, _reference(name)) < 1e-9


def _train(name: str, settings: dict[str, Any]) -> Result:
    return train_with_engine(name, **settings)


def test_checkpoints_load_at_any_tensor_size(tmp_path: Path) -> None:
    whole = run_ranks(2, _save, "gpt2", str(tmp_path / "split"))[0]
    for name, found in _load("gpt2", str(tmp_path / "split")).items():
        np.testing.assert_array_equal(found, whole[name])
    whole = _save("gpt2", str(tmp_path / "whole"))
    for name, found in run_ranks(2, _load, "gpt2", str(tmp_path / "whole"))[1].items():
        np.testing.assert_array_equal(found, whole[name])


def _engine(name: str) -> Engine:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    config = {**COMMON, "global_batch_size": 1, "tensor_model_parallel_size": ranks}
    return megatron_core.initialize(model_of(name), config).engine


def _save(name: str, folder: str) -> dict[str, np.ndarray]:
    engine = _engine(name)
    engine.backward(loss_in(call(engine, torch.utils.data.default_collate(samples_of(name, 1)))))
    engine.step()
    engine.save_checkpoint(folder)
    return weights_of(engine.full_state_dict(), engine.module)


def _load(name: str, folder: str) -> dict[str, np.ndarray]:
    engine = _engine(name)
    engine.load_checkpoint(folder)
    return weights_of(engine.full_state_dict(), engine.module)


def test_shared_key_and_value_heads() -> None:
    for result in run_ranks(2, _train_with_one_key_head):
        assert difference(result, _train_with_one_key_head()) < 1e-9


def _train_with_one_key_head() -> Result:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    MODELS["one key"] = (partial(_causal, "Llama", **{**LLAMA, "num_key_value_heads": 1}), _tokens)
    return train_with_engine("one key", tensor_model_parallel_size=ranks)


BAD: list[tuple[str, int, dict[str, str] | None, str]] = [
    ("llama", 2, {"layers.*.attn.q": "colwise"}, "'layers.*.attn.q' matches no module or parameter"),
    ("llama", 2, {"lm_head": "columns"}, "has the style 'columns', which is not supported"),
    ("llama", 3, None, "world size 2 cannot be divided by tensor"),
    ("gpt2", 2, {"lm_head": "colwise_gather_output"}, "transformer.wte.weight is tied to lm_head.weight"),
    ("convolutions", 2, None, "has no plan"),
    ("tangled", 2, {"head": "colwise_gather_output", "shared": "rowwise", "layers.*.2": "packed_colwise:3"}, "3 matri"),
]


@pytest.mark.parametrize(("name", "tensor", "plan", "message"), BAD)
def test_bad_input_is_one_sentence_on_all_ranks(
    name: str, tensor: int, plan: dict[str, str] | None, message: str
) -> None:
    for found in run_ranks(2, _refused, name, tensor, plan):
        assert message in found and "\n" not in found


def _refused(name: str, tensor: int, plan: dict[str, str] | None) -> str:
    with pytest.raises(MegatronError) as error:
        megatron_core.parallelize(model_of(name), tensor, plan=plan)
    return str(error.value)
