"""Attention with sinks against the softmax over the keys and one more score, in float64: output and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.features.context_parallelism.core_attention import ContextParallelAttention
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.context import LayerContext, PackedDocuments, SequenceContext
from megatron_core.transformer.layer_spec import core_attention_of

HEADS, GROUPS, SIZE, BATCH, LENGTH = 4, 2, 8, 2, 13
DOCUMENTS = ((5, 8), (13,))
CASES: dict[str, dict[str, Any]] = {
    "whole sequences": {},
    "window": {"window": 4},
    "documents": {"documents": DOCUMENTS},
    "window and documents": {"window": 3, "documents": DOCUMENTS},
    "bounded scores": {"softcap": 1.5, "window": 4},
    "mask": {"mask": True},
    "mask and window": {"mask": True, "window": 4},
}


def core(backend: str, *, window: int | None = None, softcap: float | None = None, **_: Any) -> torch.nn.Module:
    config = ModelConfig(
        num_layers=1, hidden_size=HEADS * SIZE, num_attention_heads=HEADS, group_query_attention=True,
        num_query_groups=GROUPS, attention_backend=backend, attention_dropout=0.0, attn_logit_softcapping=softcap,
        softmax_type="learnable",
    )  # fmt: skip
    context = LayerContext(config, ModelParallelConfig(), LocalGroup(), seed=1)
    return core_attention_of(context, 0, window_size=None if window is None else (window - 1, 0))


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(LENGTH, BATCH, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (*shapes, (HEADS,))]
    return [tensor.requires_grad_() for tensor in tensors]


def hidden(window: int | None = None, documents: Any = None, mask: bool = False, **_: Any) -> Tensor:
    """True where a query does not see a key, ``[b, 1, s, s]``."""
    far = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    found = ((far < 0) | (far >= (window or LENGTH))).expand(BATCH, 1, -1, -1)
    if documents is not None:
        number = torch.stack([torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in documents])
        found = found | (number[:, None, :, None] != number[:, None, None, :])
    return found | _mask() if mask else found


def _mask() -> Tensor:
    """A mask that hides some keys, and all keys of one query."""
    masked = torch.arange(LENGTH) > torch.arange(LENGTH)[:, None]
    masked = masked.expand(BATCH, 1, -1, -1).clone()
    masked[0, :, :, 2] = True
    masked[1, :, 6] = True
    return masked


def formula(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, softcap: float | None, unseen: Tensor) -> Tensor:
    """The equation of gpt-oss: the sink is one more score, whose weight is dropped."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) / SIZE**0.5
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    column = sinks[:, None, None].expand(BATCH, -1, LENGTH, 1)
    weights = torch.cat([scores.masked_fill(unseen, -torch.inf), column], dim=-1).softmax(-1)[..., :-1]
    return (weights @ value).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("backend", ["auto", "unfused"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_those_of_the_formula(case: str, backend: str) -> None:
    settings = CASES[case]
    mask = _mask() if settings.get("mask") else None
    documents = settings.get("documents")
    if documents is not None:
        documents = PackedDocuments.of(documents, BATCH, LENGTH, torch.device("cpu"))
    context = SequenceContext(
        attention_mask=mask, documents=documents, positions=torch.arange(LENGTH), sample_index=torch.arange(BATCH)
    )
    tensors = drawn()
    *heads, sinks = tensors
    found = core(backend, **settings)(*heads, context, sinks)
    expected = formula(*heads, sinks, settings.get("softcap"), hidden(**settings))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.arange(found.numel(), dtype=torch.float64).reshape(found.shape).cos()
    gradients = (torch.autograd.grad((output * weights).sum(), tensors) for output in (found, expected))
    for mine, right in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-11, atol=1e-12)


def test_scores_are_not_stored() -> None:
    """Attention by tiles is used for sinks, and a sink of -inf changes nothing."""
    assert isinstance(core("auto"), ContextParallelAttention)
    *heads, sinks = drawn()
    context = SequenceContext(positions=torch.arange(LENGTH))
    none = core("auto")(*heads, context, torch.full_like(sinks, -torch.inf))
    torch.testing.assert_close(none, core("auto")(*heads, context), rtol=1e-12, atol=1e-12)


def test_sinks_of_a_single_token_are_not_overwritten() -> None:
    """Log-sum-exps are added in place, also those of one sequence of one token, which have the sinks' shape."""
    *heads, sinks = drawn()
    before = sinks.detach().clone()
    core("auto")(*(each[:1, :1] for each in heads), SequenceContext(positions=torch.arange(1)), sinks)
    assert torch.equal(sinks, before)
