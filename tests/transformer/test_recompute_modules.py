"""Selective recompute: recomputed tensors are not stored, and results do not change."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from megatron_core.config import ModelConfig
from megatron_core.models import GPTModel
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer.recompute import outputs_dropped

SETTINGS = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 24,
    "disable_bias_linear": True,
    "num_experts": 2,
    "moe_shared_expert_intermediate_size": 8,
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 6,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "qk_layernorm": True,
}
IDS = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(1))


def _model(*modules: str, **settings: object) -> GPTModel:
    recompute = {"recompute_granularity": "selective", "recompute_modules": modules} if modules else {}
    config = ModelConfig(**SETTINGS | recompute | settings)
    return GPTModel(config, 31, 8, parallel=ModelParallelConfig(params_dtype=torch.float64))


def _loss(model: GPTModel) -> Tensor:
    return model(IDS[:, :-1], labels=IDS[:, 1:]).mean()


WHERE = {
    "layernorm": "input_layernorm",
    "mla_up_proj": "self_attention.linear_q_up_proj",
    "moe_act": "mlp.experts.linear_fc1",
    "shared_experts": "mlp.shared_experts.linear_fc1",
    "moe": "mlp.experts.linear_fc1",
}


@pytest.mark.parametrize("module", WHERE)
def test_gradients_stay_the_same(module: str) -> None:
    plain, model = _model(), _model(module)
    for each in (plain, model):
        _loss(each).backward()
    for (name, wanted), found in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("module", ["layernorm", "shared_experts", "moe"])
def test_what_is_recomputed_is_not_kept(module: str) -> None:
    """After forward nothing holds the part's inner tensor; without recompute the graph does."""
    for modules in ((), (module,)):
        model, held = _model(*modules), []
        part = model.decoder.layers["0"].get_submodule(WHERE[module])

        def note(part: nn.Module, args: object, output: Tensor, held: list = held) -> None:
            found = output[0] if isinstance(output, tuple) else output
            held.append(weakref.ref(found.untyped_storage()))

        part.register_forward_hook(note)
        loss = _loss(model)
        assert (held[0]() is None) == bool(modules), module
        loss.backward()


def test_only_the_outputs_are_dropped() -> None:
    """Views of them are restored; other tensors are saved unchanged, and the parts run once more."""
    calls = []
    x, other = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(6, 3, dtype=torch.float64)

    def double() -> list[Tensor]:
        calls.append(1)
        return [x * 2]

    grads = []
    for active in (False, True):
        x.grad = None
        (y,) = double()
        calls.clear()
        with outputs_dropped([y], double, active=active):
            out = (y[1:, ::2].t() @ y[1:] @ other).exp().sum() + (y.sin() ** 2).sum()
        out.backward()
        assert len(calls) == active
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=0, atol=0)
