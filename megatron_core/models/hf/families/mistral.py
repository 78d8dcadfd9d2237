"""Mistral: Llama with a sliding window; Mixtral: Mistral with experts. Ministral: windows in some layers."""

from megatron_core.config import ModelConfig
from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA
from megatron_core.models.hf.rules import ROPE, WINDOW_OF_ALL_LAYERS, WINDOWS, Rule, Settings
from megatron_core.models.hf.tensors import gate_and_up

MISTRAL = register(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    defaults={"sliding_window": 4096},
    required={"hidden_act": "silu", "attention_bias": False},
    rules=(ROPE, WINDOWS),
)


def _windows_json(config: ModelConfig) -> Settings:
    """Always a size of windows, which transformers needs, even if no layer has a window."""
    kinds = {
        "sliding_window": config.max_position_embeddings or 4096,
        "layer_types": ["full_attention"] * config.num_layers,
    }
    return kinds if config.window_size is None else WINDOWS.write(config)


MINISTRAL = register(
    MISTRAL,
    model_type="ministral",
    class_name="MinistralForCausalLM",
    rules=(ROPE, Rule(WINDOWS.read, _windows_json, WINDOWS.types)),
)
MIXTRAL = register(
    LLAMA,
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    keys={
        **LLAMA.keys,
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    defaults={"rope_theta": 1e6},
    required={"hidden_act": "silu", "router_jitter_noise": 0.0},
    rules=(ROPE, WINDOW_OF_ALL_LAYERS),
    layer_tensors={
        **LLAMA.layer_tensors,
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.linear_fc1": gate_and_up("block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"),
        "mlp.experts.linear_fc2": "block_sparse_moe.experts.{e}.w2",
    },
)
