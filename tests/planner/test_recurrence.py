"""Temporary memory of recurrences by formula, and as the operation saves it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_core.ops import delta_rule
from megatron_core.planner import recurrence
from megatron_core.planner.recurrence import Recurrence
from tests.runs import tiny_config


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention"])
def test_what_backward_computes_again(kind: str) -> None:
    batch, length, heads, keys, values = 2, 128, 4, 24, 16
    query, key = (torch.randn(batch, length, heads, keys, requires_grad=True) for _ in range(2))
    value = torch.randn(batch, length, heads, values, requires_grad=True)
    decay = -torch.rand(batch, length, heads, *([keys] if kind == "kimi_delta_attention" else []))
    inputs = [query, key, value, decay.requires_grad_(), torch.rand(batch, length, heads, requires_grad=True)]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        delta_rule.chunked_delta_rule(*inputs)
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    found = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in given)
    sizes = {"linear_key_head_dim": keys, "linear_value_head_dim": values, "linear_num_key_heads": heads}
    sizes |= {"linear_num_value_heads": heads, "experimental_attention_variant": kind, "linear_attention_freq": (2,)}
    config = tiny_config(**sizes, seq_length=length, micro_batch_size=batch)
    assert Recurrence.of(config).again == pytest.approx(found, rel=0.01)


def test_chunks_are_those_of_the_operation() -> None:
    assert (recurrence.CHUNK, recurrence.CHANNEL_CHUNK) == (delta_rule.CHUNK, delta_rule.CHANNEL_CHUNK)
