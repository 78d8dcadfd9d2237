"""GLM-4: Llama with biases of queries, keys and values, and rotary positions of adjacent channels in a part of each
head; GLM-4-0414 with four norms a layer."""

from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA
from megatron_core.models.hf.rules import PARTIAL_ROPE

GLM = register(
    LLAMA,
    model_type="glm",
    class_name="GlmForCausalLM",
    keys={**LLAMA.keys, "attention_bias": "add_qkv_bias"},
    fixed={**LLAMA.fixed, "rotary_interleaved": True},
    defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5},
    required={"hidden_act": "silu"},
    rules=(PARTIAL_ROPE,),
    layer_tensors={**LLAMA.layer_tensors, "mlp.linear_fc1": "mlp.gate_up_proj"},
)
GLM4 = register(
    GLM,
    model_type="glm4",
    class_name="Glm4ForCausalLM",
    fixed={**GLM.fixed, "norm_placement": "sandwich"},
    layer_tensors={
        **GLM.layer_tensors,
        "post_self_attn_layernorm": "post_self_attn_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_mlp_layernorm",
    },
)
