"""Norms of queries and keys without weights, and layers without rotary positions, against the formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.models import GPTModel
from megatron_core.parallel.groups import LocalGroup
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext
from megatron_core.transformer.layer_spec import layer_spec
from megatron_core.transformer.rotary import plain_frequencies, rotary_table

HEADS, D, HIDDEN, LENGTH = 3, 6, 10, 7
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "kv_channels": D,
    "attention_dropout": 0.0,
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "norm_epsilon": 1e-2,
}


def _attended(x: Tensor, layer: int, **settings: object) -> tuple[Tensor, Tensor, Tensor]:
    """Output of the attention of a layer and the weights of its two projections, the same in all layers."""
    config = ModelConfig(**SHAPE, **settings)
    torch.manual_seed(1)
    context = LayerContext(config, ModelParallelConfig(params_dtype=torch.float64), LocalGroup(), 1)
    attention = layer_spec(config, layer).self_attention(context, layer)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    table = rotary_table(torch.arange(LENGTH)[None], plain_frequencies(D, config.rotary_base))
    output, _ = attention(x, SequenceContext(rotary=table))
    return output, attention.linear_qkv.weight, attention.linear_proj.weight.detach()


def _expected(x: Tensor, weight: Tensor, attention: Tensor, *, norm: bool, rotary: bool) -> Tensor:
    """softmax(q k / sqrt(d)) v in float64, head by head, before the output projection."""
    found = []
    for rows in weight.unflatten(0, (HEADS, 3, D)):
        q, k, v = (torch.einsum("sbh,dh->bsd", x, row) for row in rows)
        if norm:
            q, k = (y * (y.square().mean(-1, keepdim=True) + SHAPE["norm_epsilon"]) ** -0.5 for y in (q, k))
        if rotary:
            angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
            turned = []
            for y in (q, k):
                a, b = y[..., : D // 2], y[..., D // 2 :]
                turned.append(torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1))
            q, k = turned
        scores = (q @ k.mT / D**0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        found.append(scores.softmax(-1) @ v)
    return torch.cat(found, -1).transpose(0, 1) @ attention.t()


def test_output_and_gradients_are_those_of_the_formula() -> None:
    x = torch.randn(LENGTH, 2, HIDDEN, dtype=torch.float64)
    outputs = []
    for layer in range(4):
        settings = {"qk_l2_norm": layer != 1, "no_rope_freq": (0, 0, 1, 0)}
        output, weight, projection = _attended(x, layer, **settings)
        again = weight.detach().requires_grad_()
        expected = _expected(x, again, projection, norm=layer != 1, rotary=layer != 2)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        seed = torch.randn_like(output)
        gradients = torch.autograd.grad(output, weight, seed)[0], torch.autograd.grad(expected, again, seed)[0]
        torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
        outputs.append(output)
    # Products in float64 may differ in the last bit with the alignment of their memory.
    torch.testing.assert_close(outputs[0], outputs[3], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(outputs[0], outputs[2])


def test_every_nth_layer_and_no_new_weights() -> None:
    config = ModelConfig(**SHAPE, no_rope_freq=(2,), qk_l2_norm=True)
    assert [config.has_rotary(layer) for layer in range(5)] == [
        True,
        False,
        True,
        False,
        False,
    ]
    names = {name for name, _ in GPTModel(config, 32, 8).named_parameters()}
    assert names == {name for name, _ in GPTModel(ModelConfig(**SHAPE), 32, 8).named_parameters()}


def test_chunks_and_temperature_of_packed_documents_are_those_of_each_alone() -> None:
    """In float64: documents of 11 and 9 tokens, chunks of 4, and the logits of each document in its own sequence."""
    config = ModelConfig(
        **SHAPE,
        no_rope_freq=(2,),
        attention_chunk_size=4,
        query_temperature_scale=0.5,
        query_temperature_floor=3,
        hidden_dropout=0.0,
    )
    model = GPTModel(config, 32, 20, parallel=ModelParallelConfig(params_dtype=torch.float64)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids, lengths = torch.randint(32, (1, 20)), (11, 9)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, position_ids=positions, sequences=SequenceDetails(document_lengths=[lengths]))
    alone = torch.cat([model(part) for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)
    whole = GPTModel(replace(config, attention_chunk_size=None), 32, 20, parallel=model.parallel).eval()
    whole.load_state_dict(model.state_dict())
    assert torch.allclose(whole(ids[:, :4]), model(ids[:, :4])) and not torch.allclose(whole(ids), model(ids))
