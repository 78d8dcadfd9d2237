"""The functions of Megatron-LM's ``rl_utils``, against formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.rl import rl_utils
from megatron.rl.sequence_packing_utils import get_default_packed_seq_params
from megatron_core.errors import ConfigError
from tests.drop_in.test_gpt_model import IDS, LENGTH, MASK, gpt


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_log_probabilities_of_tokens(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 7, dtype=dtype)
    tokens = torch.randint(7, (2, 3))
    expected = logits.double().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    result = rl_utils.selective_log_softmax(logits, tokens)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, atol=1e-12 if dtype == torch.float64 else 0.02, rtol=0)


def test_advantages_leave_out_episodes_without_turns() -> None:
    rewards = [[-1.0, 1.0, 50.0], [4.0, 4.0, 4.0], [2.0, 3.0, 7.0]]
    turns = [[1, 2, 0], [1, 1, 1], [0, 0, 0]]
    result = rl_utils.calculate_grpo_advantages(rewards, turns)
    np.testing.assert_allclose(result, [-1 / 1.0001, 1 / 1.0001, 0, 0, 0, 0, 0, 0, 0], atol=1e-15)


def _loss_of_token(current: float, old: float, reference: float, sampled: float, advantage: float) -> float:
    """Equation 3 of arXiv 2402.03300 with a weight for the sampler's error and an entropy bonus."""
    ratio = math.exp(current - old)
    gain = min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    divergence = math.exp(reference - current) - (reference - current) - 1
    return 0.1 * divergence - min(math.exp(old - sampled), 1.5) * gain + 0.01 * math.exp(current) * current


@pytest.mark.parametrize("packed", [False, True])
def test_loss_of_each_token(packed: bool) -> None:
    torch.manual_seed(1)
    rows = 1 if packed else 3
    current, old, reference, sampled = -2 * torch.rand(4, rows, 9, dtype=torch.float64)
    advantages = torch.tensor([0.7, -1.5, 2.0], dtype=torch.float64)
    of_tokens = advantages[:, None].expand(3, 9)
    borders: dict[str, list[int]] = {}
    if packed:
        borders = {"seq_starts": [0, 3, 8], "seq_lengths": [3, 5, 4]}
        of_tokens = torch.tensor([[0.7, 0.7, 0, -1.5, -1.5, -1.5, -1.5, 0, 2.0]], dtype=torch.float64)
    arguments = (current, old, reference, advantages, 0.2, 0.3, 0.1, 0.01, sampled, 1.5)
    loss, _, ratios, _, above, below = rl_utils.calculate_grpo_loss(*arguments, **borders)
    tokens = zip(*(x.flatten().tolist() for x in (current, old, reference, sampled, of_tokens)), strict=True)
    np.testing.assert_allclose(loss.flatten(), [_loss_of_token(*numbers) for numbers in tokens], rtol=1e-12)
    assert torch.equal(above, ratios > 1.3) and above.any()
    assert torch.equal(below, ratios < 0.8) and below.any()


@pytest.mark.parametrize("no_grad", [False, True])
def test_log_probabilities_of_a_model(no_grad: bool) -> None:
    model = gpt(position_embedding_type="rope")
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    borders = torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    result = rl_utils.get_logprobs(model, IDS, positions, no_grad=no_grad, packed_seq_params=packed)
    expected = model(IDS, positions, MASK).log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    assert result.requires_grad is not no_grad


def test_names_of_the_loop_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"megatron_core\.post_training"):
        rl_utils.get_rl_runtime_state()


def test_borders_may_repeat() -> None:
    borders = torch.tensor([0, 3, 8, 8, 8], dtype=torch.int32)
    packed = PackedSeqParams("thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    assert packed.document_lengths(1, 8) == [[3, 5]]


def test_default_borders_are_those_of_one_sequence() -> None:
    params = get_default_packed_seq_params(LENGTH, 3, torch.device("cpu"))
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q is not None and params.cu_seqlens_q.dtype == torch.int32
    assert params.cu_seqlens_q.tolist() == [0, LENGTH, LENGTH, LENGTH, LENGTH]
    model = gpt(position_embedding_type="rope")
    arguments = (model, IDS[:1], torch.arange(LENGTH)[None])
    packed = rl_utils.get_logprobs(*arguments, packed_seq_params=params)
    torch.testing.assert_close(packed, rl_utils.get_logprobs(*arguments), atol=1e-12, rtol=0)
