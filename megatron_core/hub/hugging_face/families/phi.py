"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel with one norm, biases everywhere, rotary positions in a part
of each head's channels."""

from megatron_core.hub.hugging_face.architecture import Architecture, register
from megatron_core.hub.hugging_face.families.llama import LLAMA
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, gelu
from megatron_core.hub.hugging_face.tensors import separate_qkv

PHI = register(
    Architecture(
        model_type="phi",
        class_name="PhiForCausalLM",
        keys={
            "num_hidden_layers": "num_layers",
            "hidden_size": "hidden_size",
            "num_attention_heads": "num_attention_heads",
            "num_key_value_heads": "num_query_groups",
            "intermediate_size": "ffn_hidden_size",
            "layer_norm_eps": "norm_epsilon",
            "max_position_embeddings": "max_position_embeddings",
            "initializer_range": "init_method_std",
            "qk_layernorm": "qk_layernorm",
            "embd_pdrop": "hidden_dropout",
            "resid_pdrop": "hidden_dropout",  # takes precedence
            "attention_dropout": "attention_dropout",
        },
        fixed={
            "position_embedding_type": "rope",
            "parallel_residual": True,
            "parallel_residual_shared_norm": True,
            "add_output_layer_bias": True,
        },
        defaults={"layer_norm_eps": 1e-5, "qk_layernorm": False, "partial_rotary_factor": 0.5},
        rules=(PARTIAL_ROPE, gelu("hidden_act", "gelu_new")),
        tensors={**LLAMA.tensors, "decoder.final_layernorm": "model.final_layernorm"},
        layer_prefix=LLAMA.layer_prefix,
        layer_tensors={
            "input_layernorm": "input_layernorm",
            "self_attention.linear_qkv": separate_qkv("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "self_attention.linear_proj": "self_attn.dense",
            "self_attention.q_layernorm": "self_attn.q_layernorm",
            "self_attention.k_layernorm": "self_attn.k_layernorm",
            "mlp.linear_fc1": "mlp.fc1",
            "mlp.linear_fc2": "mlp.fc2",
        },
    )
)
