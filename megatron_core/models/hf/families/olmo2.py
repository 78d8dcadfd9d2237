"""OLMo 2: Llama with norms behind attention and MLP, and norms of queries and keys over all heads."""

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA, QK_NORMS

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
