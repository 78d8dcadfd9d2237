"""Temporary memory of recurrences by formula, and as the operation saves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_core.features.recurrent import delta_rule, state_space
from megatron_core.features.recurrent import recurrence as operation
from megatron_core.planner import recurrence
from megatron_core.planner.recurrence import RecurrenceCost
from tests.runs import tiny_config


def kept_by(operation: Callable[..., Any], *inputs: Tensor) -> int:
    """Bytes of the tensors that an operation saves for backward in addition to its inputs."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        operation(*inputs)
    given = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in given)


@pytest.mark.parametrize("kind", ["gated_delta_net", "kimi_delta_attention"])
def test_what_backward_computes_again(kind: str) -> None:
    batch, length, heads, keys, values = 2, 128, 4, 24, 16
    query, key = (torch.randn(batch, length, heads, keys, requires_grad=True) for _ in range(2))
    value = torch.randn(batch, length, heads, values, requires_grad=True)
    decay = -torch.rand(batch, length, heads, *([keys] if kind == "kimi_delta_attention" else []))
    inputs = [query, key, value, decay.requires_grad_(), torch.rand(batch, length, heads, requires_grad=True)]
    found = kept_by(delta_rule.chunked_delta_rule, *inputs)
    sizes = {"linear_key_head_dim": keys, "linear_value_head_dim": values, "linear_num_key_heads": heads}
    sizes |= {"linear_num_value_heads": heads, "experimental_attention_variant": kind, "linear_attention_freq": (2,)}
    config = tiny_config(**sizes, seq_length=length, micro_batch_size=batch)
    assert RecurrenceCost.of(config, 0).again == pytest.approx(found, rel=0.01)


def test_what_backward_computes_again_of_mamba() -> None:
    batch, length, groups, heads, states, channels = 2, 128, 2, 4, 24, 16
    query, key = (torch.randn(batch, length, groups, states, requires_grad=True) for _ in range(2))
    value = torch.randn(batch, length, heads, channels, requires_grad=True)
    decay = (-torch.rand(batch, length, heads)).requires_grad_()
    found = kept_by(state_space.chunked_state_space, query, key, value, decay)
    sizes = {"num_layers": 1, "hybrid_layer_pattern": "M", "mamba_state_dim": states, "mamba_head_dim": channels}
    sizes |= {"mamba_num_groups": groups, "mamba_num_heads": heads}
    config = tiny_config(**sizes, seq_length=length, micro_batch_size=batch)
    assert RecurrenceCost.of(config, 0).again == pytest.approx(found, rel=0.01)


def test_chunks_are_those_of_the_operation() -> None:
    assert (recurrence.CHUNK, recurrence.CHANNEL_CHUNK) == (operation.CHUNK, delta_rule.CHANNEL_CHUNK)
