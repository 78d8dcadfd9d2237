"""GPT-2: learned positions, layer norms, matrices stored as ``[in, out]``."""

from megatron_core.models.hf.architecture import Architecture, register
from megatron_core.models.hf.rules import gelu
from megatron_core.models.hf.tensors import stacked_qkv, transposed

GPT2 = register(
    Architecture(
        model_type="gpt2",
        class_name="GPT2LMHeadModel",
        base="transformer.",
        keys={
            "n_layer": "num_layers",
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "ffn_hidden_size",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "init_method_std",
            "embd_pdrop": "hidden_dropout",
            "resid_pdrop": "hidden_dropout",  # takes precedence
            "attn_pdrop": "attention_dropout",
        },
        defaults={"tie_word_embeddings": True},
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        rules=(gelu("activation_function", "gelu_new"),),
        tensors={
            "embedding.word_embeddings": "transformer.wte",
            "embedding.position_embeddings": "transformer.wpe",
            "decoder.final_layernorm": "transformer.ln_f",
            "output_layer": "lm_head",
        },
        layer_prefix="transformer.h.{n}.",
        layer_tensors={
            "input_layernorm": "ln_1",
            "self_attention.linear_qkv": stacked_qkv("attn.c_attn", transposed=True),
            "self_attention.linear_proj": transposed("attn.c_proj"),
            "pre_mlp_layernorm": "ln_2",
            "mlp.linear_fc1": transposed("mlp.c_fc"),
            "mlp.linear_fc2": transposed("mlp.c_proj"),
        },
        derived=r"h\.\d+\.attn\.(masked_)?bias",
    )
)
