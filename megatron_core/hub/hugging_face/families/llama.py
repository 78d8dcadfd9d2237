"""Llama 2 and 3, SmolLM and other models of the same shape."""

from megatron_core.features.presets.published import LLAMA_LAYERS
from megatron_core.hub.hugging_face.architecture import Architecture, register
from megatron_core.hub.hugging_face.rules import ATTENTION_BIASES, ROPE
from megatron_core.hub.hugging_face.tensors import gate_and_up, separate_qkv

LLAMA = register(
    Architecture(
        model_type="llama",
        class_name="LlamaForCausalLM",
        keys={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_query_groups",
            "head_dim": "kv_channels",
            "intermediate_size": "ffn_hidden_size",
            "rms_norm_eps": "norm_epsilon",
            "max_position_embeddings": "max_position_embeddings",
            "initializer_range": "init_method_std",
            "attention_dropout": "attention_dropout",
        },
        fixed=LLAMA_LAYERS,
        required={"hidden_act": "silu", "mlp_bias": False},
        rules=(ROPE, ATTENTION_BIASES),
        tensors={
            "embedding.word_embeddings": "model.embed_tokens",
            "decoder.final_layernorm": "model.norm",
            "output_layer": "lm_head",
        },
        layer_prefix="model.layers.{n}.",
        layer_tensors={
            "input_layernorm": "input_layernorm",
            "self_attention.linear_qkv": separate_qkv("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attention.linear_proj": "self_attn.o_proj",
            "pre_mlp_layernorm": "post_attention_layernorm",
            "mlp.linear_fc1": gate_and_up("mlp.gate_proj", "mlp.up_proj"),
            "mlp.linear_fc2": "mlp.down_proj",
        },
    )
)
QK_NORMS = {"self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm"}
"""Norms of queries and keys, under the names of most architectures."""
