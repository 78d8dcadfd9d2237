"""Our layers of experts: with the same weights `transformers` gives the same outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.features.experts.layer import MoELayer
from megatron_core.features.presets.published import LAYERS as LAYERS_OF_FAMILIES
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.transformer import LayerContext, SequenceContext
from tests.hub.test_against_transformers import (
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCABULARY,
    _compare,
    _fuse,
    _ours,
    _same_gradients,
)

EXPERTS, FFN, GROUPS = 8, 24, 2
TOLERANCE = 2e-6  # their norms, rotary tables and routers are float32 in a float64 model, too
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": 8,
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "experts_implementation": "eager",
}
OURS = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 48,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "num_experts": EXPERTS,
    "moe_ffn_hidden_size": FFN,
}


def _pairs(theirs: torch.nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """``of`` each of their weights, by our names."""
    found = {
        "embedding.word_embeddings.weight": of(theirs.model.embed_tokens.weight),
        "decoder.final_layernorm.weight": of(theirs.model.norm.weight),
        "output_layer.weight": of(theirs.lm_head.weight),
    }
    for n, block in enumerate(theirs.model.layers):
        layer, attention, mlp = f"decoder.layers.{n}.", block.self_attn, block.mlp
        found |= {
            f"{layer}input_layernorm.weight": of(block.input_layernorm.weight),
            f"{layer}pre_mlp_layernorm.weight": of(block.post_attention_layernorm.weight),
            f"{layer}self_attention.linear_proj.weight": of(attention.o_proj.weight),
        }
        if hasattr(attention, "kv_b_proj"):
            found |= {f"{layer}self_attention.{name}": value for name, value in _latent_pairs(attention, of).items()}
        else:
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            fused = _fuse(*(of(p.weight) for p in projections), GROUPS)
            found[f"{layer}self_attention.linear_qkv.weight"] = fused
        if hasattr(attention, "q_norm"):
            found[f"{layer}self_attention.q_layernorm.weight"] = of(attention.q_norm.weight)
            found[f"{layer}self_attention.k_layernorm.weight"] = of(attention.k_norm.weight)
        if hasattr(mlp, "gate"):
            found |= {f"{layer}mlp.{name}": value for name, value in _moe_pairs(mlp, of).items()}
        else:
            found[f"{layer}mlp.linear_fc1.weight"] = torch.cat([of(mlp.gate_proj.weight), of(mlp.up_proj.weight)])
            found[f"{layer}mlp.linear_fc2.weight"] = of(mlp.down_proj.weight)
    return found


def _latent_pairs(attention: torch.nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    names = {
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
    }
    return {f"{ours}.weight": of(getattr(attention, theirs).weight) for ours, theirs in names.items()}


def _moe_pairs(block: torch.nn.Module, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    found = {
        "router.weight": of(block.gate.weight),
        "experts.linear_fc1.weight": of(block.experts.gate_up_proj),
        "experts.linear_fc2.weight": of(block.experts.down_proj),
    }
    if hasattr(block, "shared_experts"):
        shared = block.shared_experts
        gate_and_up = torch.cat([of(shared.gate_proj.weight), of(shared.up_proj.weight)])
        found |= {
            "shared_experts.linear_fc1.weight": gate_and_up,
            "shared_experts.linear_fc2.weight": of(shared.down_proj.weight),
        }
    return found


def test_mixtral() -> None:
    config = transformers.MixtralConfig(
        **SHAPE, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=None
    )
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(config).double()
    ours = _ours(**OURS, rotary_base=config.rope_parameters["rope_theta"])
    _compare(ours, theirs, _pairs(theirs, Tensor.detach), TOLERANCE)
    _same_gradients(ours, _pairs(theirs, lambda x: x.grad), TOLERANCE)


@pytest.mark.parametrize("renormalised", [True, False])
def test_qwen3_moe(renormalised: bool) -> None:
    """A dense layer among layers of experts; probabilities of the chosen experts with and without normalisation."""
    config = transformers.Qwen3MoeConfig(
        **SHAPE, intermediate_size=48, moe_intermediate_size=FFN, num_experts=EXPERTS, num_experts_per_tok=3,
        norm_topk_prob=renormalised, mlp_only_layers=[1], decoder_sparse_step=1,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.Qwen3MoeForCausalLM(config).double()
    torch.nn.init.normal_(theirs.model.layers[0].mlp.gate.weight, std=0.5)
    settings = {"moe_router_topk": 3, "moe_router_pre_softmax": not renormalised, "moe_layer_freq": (1, 0, 1)}
    ours = _ours(**OURS, **settings, qk_layernorm=True, kv_channels=8)
    _compare(ours, theirs, _pairs(theirs, Tensor.detach), TOLERANCE)
    _same_gradients(ours, _pairs(theirs, lambda x: x.grad), TOLERANCE)


def test_deepseek_v3_block() -> None:
    """Only the layer of experts: sigmoid, groups, a bias for the choice, a factor, shared experts."""
    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=FFN, n_routed_experts=EXPERTS, n_shared_experts=2,
        num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.models.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE(config).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    theirs.gate.e_score_correction_bias.normal_(std=0.2)
    settings = {
        **OURS,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 2 * FFN,
    }
    model = ModelConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, **settings)
    ours = MoELayer(LayerContext(model, ModelParallelConfig(params_dtype=torch.float64), LocalGroup(), 1), 0)
    parameters = dict(ours.named_parameters())
    pairs = _moe_pairs(theirs, Tensor.detach)
    assert set(parameters) == {*pairs, "router.expert_bias"}
    with torch.no_grad():
        for name, value in pairs.items():
            parameters[name].copy_(value)
        ours.router.expert_bias.copy_(theirs.gate.e_score_correction_bias)
    x = torch.randn(2, LENGTH, HIDDEN, dtype=torch.float64)
    mine, other = x.transpose(0, 1).clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = ours(mine, SequenceContext())[0].transpose(0, 1), theirs(other)
    torch.testing.assert_close(output, expected, rtol=TOLERANCE, atol=TOLERANCE)
    weights = torch.randn_like(output)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(mine.grad.transpose(0, 1), other.grad, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)
    for name, wanted in _moe_pairs(theirs, lambda x: x.grad).items():
        scale = wanted.abs().max()
        assert (parameters[name].grad - wanted).abs().max() < 10 * TOLERANCE * scale, name


def test_deepseek_v3() -> None:
    """The whole model: a dense layer, then experts, latent attention in all of them."""
    config = transformers.DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": HEADS, "head_dim": 4, "rms_norm_eps": 1e-6, "num_mtp_layers": 0},
        intermediate_size=48, moe_intermediate_size=FFN, n_routed_experts=EXPERTS, n_shared_experts=1,
        num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1,
        q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.DeepseekV3ForCausalLM(config).double()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    own = {
        **LAYERS_OF_FAMILIES["deepseek_v3"],
        "norm_epsilon": 1e-6,
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "moe_layer_freq": (0, 1, 1),
        "moe_router_topk": 4,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": FFN,
    }
    without = {name: value for name, value in OURS.items() if name not in ("group_query_attention", "num_query_groups")}
    ours = _ours(**without | {name: value for name, value in own.items() if "dropout" not in name})
    biases = {name: bias.detach() for name, bias in ours.named_parameters() if name.endswith("expert_bias")}
    for name, bias in biases.items():
        bias.normal_(std=0.2)
        theirs.model.layers[int(name.split(".")[2])].mlp.gate.e_score_correction_bias.copy_(bias)
    _compare(ours, theirs, _pairs(theirs, Tensor.detach) | biases, TOLERANCE)
    _same_gradients(ours, _pairs(theirs, lambda x: x.grad), TOLERANCE)
