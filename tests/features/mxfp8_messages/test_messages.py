"""Messages of experts in MXFP8: numbers against the written equation, and products that find them already rounded.

Bytes are counted in ``tests/features/experts/test_replay_and_traffic.py``; ``tests/plain`` trains with both formats.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.config.validate import problems
from megatron_core.features.mxfp8_messages.messages import MXFP8Rows
from megatron_core.parallel.groups import ALONE
from megatron_core.training.step import train_step
from tests.plain.experts import rounded_to_mxfp8
from tests.runs import tiny_config, tiny_run

MODEL = {"num_experts": 4, "moe_ffn_hidden_size": 32, "disable_bias_linear": True, "bf16": True}
TOKENS, GRADIENTS = {"moe_dispatch_fwd_dtype": "mxfp8"}, {"moe_combine_bwd_dtype": "mxfp8"}


def _sent(x: Tensor) -> Tensor:
    rows, handle = MXFP8Rows()(x, [len(x)], [len(x)], ALONE)
    handle.wait()
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [32, 40, 96])
def test_rows_are_rounded_as_written(dtype: torch.dtype, channels: int) -> None:
    generator = torch.Generator().manual_seed(1)
    powers = 2.0 ** torch.randint(-20, 20, (9, channels), generator=generator)
    x = (torch.randn(9, channels, generator=generator) * powers).to(dtype)
    x[0] = 0
    x[1] = 448.0  # the largest number of e4m3: the scale is 1
    x[2] = 450.0  # beyond it, so that the scale is 2, and not clamped to 448
    for rows in (x, x.t().contiguous().t(), x[:0]):
        torch.testing.assert_close(_sent(rows), rounded_to_mxfp8(rows.double()).to(dtype), rtol=0, atol=0)
    probabilities = x[:, 0].contiguous()
    assert _sent(probabilities) is probabilities


def test_numbers_that_are_not_finite_arrive_as_nan() -> None:
    x = torch.ones(2, 64)
    x[0, 3] = torch.inf
    x[1, 40] = torch.nan
    rows = _sent(x)
    assert rows.isnan().tolist() == [[True] * 32 + [False] * 32, [False] * 32 + [True] * 32]


def test_products_in_mxfp8_find_tokens_already_rounded() -> None:
    """Their own rounding changes no bit of rounded tokens, so that forwards are equal, as in Megatron Core, whose
    products take the message itself."""
    products = MODEL | {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}
    first, *others = [train_step(tiny_run(**products, **formats)) for formats in ({}, TOKENS, GRADIENTS)]
    assert [other.loss for other in others] == [first.loss] * 2
    plain, rounded = (train_step(tiny_run(**MODEL, **formats)).loss for formats in ({}, TOKENS))
    assert plain != rounded


@pytest.mark.parametrize("formats", [TOKENS, GRADIENTS])
def test_other_dispatchers_and_dense_layers_are_refused(formats: dict[str, str]) -> None:
    gathered = tiny_config(**MODEL, **formats, moe_token_dispatcher_type="allgather")
    (problem,) = problems(gathered, 1)
    assert f"{next(iter(formats))}=mxfp8" in problem and "--moe-token-dispatcher-type alltoall" in problem
    (problem,) = problems(tiny_config(**formats), 1)
    assert "--num-experts" in problem
