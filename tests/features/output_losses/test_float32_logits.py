"""Logits in float32 of 16-bit inputs and weights: sums of exact products, with a gradient rounded to 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.training.step import train_step
from tests.runs import tiny_config, tiny_run


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logits_and_gradients_are_those_of_the_equations(dtype: str) -> None:
    run = tiny_run(**{dtype: True}, output_logit_dtype="fp32")
    head = run.stages[0].output_layer
    weight = run.stages[0].embedding.word_embeddings.weight
    hidden = torch.randn(5, 3, weight.shape[1]).to(weight.dtype).requires_grad_()
    target = torch.randint(0, 21, (5, 3))
    logits = head.logits(hidden, weight)
    exact = hidden.detach().double() @ weight.detach().double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=1e-6)
    assert (logits.to(weight.dtype) != logits).any()
    (head.losses(hidden, target, weight).sum() * 2.0).backward()
    wanted = exact[..., : head.vocab_size].requires_grad_()
    (cross_entropy(wanted.flatten(0, 1), target.flatten(), reduction="sum") * 2.0).backward()
    rounded = wanted.grad.to(weight.dtype).double()
    expected = rounded @ weight.detach()[: head.vocab_size].double()
    torch.testing.assert_close(hidden.grad.double(), expected, rtol=2**-7, atol=2**-10)
    main_grad = torch.einsum("sbv,sbh->vh", rounded, hidden.detach().double())
    torch.testing.assert_close(weight.main_grad[: head.vocab_size].double(), main_grad, rtol=2**-7, atol=2**-9)


def test_it_changes_the_loss_of_bfloat16_alone() -> None:
    losses = [train_step(tiny_run(bf16=True, output_logit_dtype=value)).loss for value in (None, "bf16", "fp32")]
    assert losses[0] == losses[1] != losses[2]
    assert losses[2] == pytest.approx(losses[0], rel=1e-3)


def test_contradictions() -> None:
    fused = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
    for settings, words in (
        ({"bf16": True, "output_logit_dtype": "fp32", **fused}, "output_logit_dtype=fp32 cannot be used with cross_en"),
        ({"fp16": True, "output_logit_dtype": "bf16"}, "output_logit_dtype=bf16 needs --bf16"),
        ({"output_logit_dtype": "fp32"}, "output_logit_dtype=fp32.*--bf16 or --fp16"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(tiny_config(**settings), 1)
