"""``deepspeed.init_inference`` against the model itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed
from megatron_core.errors import ConfigError
from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed.test_parallel_sizes import _model

TOKENS = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(0))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


def _generated(size: int) -> tuple[list[list[int]], list[float]]:
    engine = deepspeed.init_inference(
        _model("Llama"), tensor_parallel={"tp_size": size}, dtype=torch.float32, replace_with_kernel_inject=True
    )
    assert not engine.module.training and engine.mp_world_size == size
    return engine.generate(TOKENS, **GREEDY).tolist(), engine(TOKENS).logits[0, -1].tolist()


def test_ranks_generate_the_tokens_of_the_model() -> None:
    model = _model("Llama").eval()
    tokens = model.generate(TOKENS, **GREEDY).tolist()
    logits = model(TOKENS).logits[0, -1].tolist()
    for found, last in run_ranks(2, _generated, 2, backend="gloo"):
        assert found == tokens
        assert last == pytest.approx(logits, abs=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ({"dtype": torch.int8}, "dtype='torch.int8' is not supported"),
        ({"checkpoint": "weights.json"}, "checkpoint='weights.json' is not supported: load weights before"),
        ({"config": {"mp_size": 1}, "mp_size": 2}, "mp_size in config and as an argument differ"),
    ),
)
def test_keys_without_a_meaning_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deepspeed.init_inference(_model("Llama"), **keys)
