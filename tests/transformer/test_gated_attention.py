"""The gate of attention's output against the formula, and weight decay of the norms of queries and keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.data_parallel import DataParallel
from megatron_core.models import GPTModel
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext
from megatron_core.transformer.attention import SelfAttention

HEADS, GROUPS, D, HIDDEN = 4, 2, 6, 20
SHAPE = {
    "num_layers": 1,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "kv_channels": D,
    "attention_dropout": 0.0,
    "disable_bias_linear": True,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
}


def _attention(**settings: object) -> tuple[SelfAttention, list[Tensor]]:
    """The layer, and the input of its output projection."""
    parallel = ModelParallelConfig(params_dtype=torch.float64)
    attention = SelfAttention(LayerContext(ModelConfig(**SHAPE, **settings), parallel, LocalGroup(), 1), 0)
    given: list[Tensor] = []
    attention.linear_proj.register_forward_pre_hook(lambda module, args: given.append(args[0]))
    return attention, given


def test_output_is_multiplied_by_the_sigmoid_of_its_gate() -> None:
    gated, found = _attention(attention_output_gate=True)
    plain, expected = _attention()
    rows = gated.linear_qkv.weight.detach().unflatten(0, (GROUPS, 2 * HEADS // GROUPS + 2, D))
    query, gate, key_and_value = rows.split([HEADS // GROUPS, HEADS // GROUPS, 2], dim=1)
    plain.linear_qkv.weight = nn.Parameter(torch.cat([query, key_and_value], dim=1).flatten(0, 2))
    x = torch.randn(7, 3, HIDDEN, dtype=torch.float64)
    for attention in (gated, plain):
        attention(x, SequenceContext())
    wanted = expected[0] * torch.sigmoid(x @ gate.flatten(0, 2).t())
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decays", [False, True])
def test_norms_of_queries_and_keys_alone_decay(decays: bool) -> None:
    config = ModelConfig(**SHAPE, qk_layernorm=True, apply_wd_to_qk_layernorm=decays)
    model = GPTModel(config, 32, 8)
    data = DataParallel({0: model}, ParallelGroups.single())
    of = {id(parameter): bucket.kind for bucket in data.buckets for parameter in bucket.parameters}
    for name, parameter in model.named_parameters():
        kind = of[id(parameter)]
        expected = parameter.dim() > 1 or (decays and name.endswith(("q_layernorm.weight", "k_layernorm.weight")))
        assert (kind.decay, kind.matrix) == (expected, parameter.dim() > 1), name
