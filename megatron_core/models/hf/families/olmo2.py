"""OLMo 2: Llama with norms behind attention and MLP, and norms of queries and keys over all heads. OLMoE: with these
norms of queries and keys, and with experts."""

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA, QK_NORMS
from megatron_core.models.hf.families.qwen import ROUTER_SOFTMAX
from megatron_core.models.hf.rules import ROPE
from megatron_core.models.hf.tensors import gate_and_up

OLMO2 = register(
    LLAMA,
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    keys={key: name for key, name in LLAMA.keys.items() if key != "head_dim"},
    fixed={**LLAMA.fixed, "qk_layernorm": True, "qk_layernorm_over_heads": True, "norm_placement": "post"},
    required={"hidden_act": "silu", "attention_bias": False},
    layer_tensors={
        **LLAMA.layer_tensors,
        **QK_NORMS,
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
)
OLMOE = register(
    LLAMA,
    model_type="olmoe",
    class_name="OlmoeForCausalLM",
    keys={
        **{key: name for key, name in LLAMA.keys.items() if key != "head_dim"},
        "num_experts": "num_experts",
        "num_experts_per_tok": "moe_router_topk",
        "router_aux_loss_coef": "moe_aux_loss_coeff",
    },
    fixed={**LLAMA.fixed, "qk_layernorm": True, "qk_layernorm_over_heads": True},
    aliases={"num_local_experts": "num_experts"},
    required={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    rules=(ROPE, ROUTER_SOFTMAX),
    layer_tensors={
        **LLAMA.layer_tensors,
        **QK_NORMS,
        "mlp.router": "mlp.gate",
        "mlp.experts.linear_fc1": gate_and_up("mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"),
        "mlp.experts.linear_fc2": "mlp.experts.{e}.down_proj",
    },
)
