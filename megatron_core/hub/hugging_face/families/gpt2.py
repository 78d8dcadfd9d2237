"""GPT-2: learned positions, layer norms, matrices stored as ``[in, out]``. GPTBigCode (StarCoder 1): one key and value
head, and matrices that are not transposed."""

from megatron_core.hub.hugging_face.architecture import Architecture, register
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, gelu
from megatron_core.hub.hugging_face.tensors import stacked_qkv, transposed
from megatron_core.schema import SWITCH

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


def _key_heads(hf_config: Settings) -> Settings:
    """One head of keys and values for all queries, or one for each."""
    is_shared = hf_config.get("multi_query", True) and hf_config["n_head"] > 1
    return {"group_query_attention": True, "num_query_groups": 1} if is_shared else {}


GPT_BIGCODE = register(
    GPT2,
    model_type="gpt_bigcode",
    class_name="GPTBigCodeForCausalLM",
    required={"scale_attn_weights": True, "add_cross_attention": False},
    rules=(
        gelu("activation_function", "gelu_pytorch_tanh"),
        KeyRule(_key_heads, lambda config: {"multi_query": config.query_groups == 1}, {"multi_query": SWITCH}),
    ),
    layer_tensors={
        **GPT2.layer_tensors,
        # With one head of keys and values, and with one for each query, the rows are stored in our order.
        "self_attention.linear_qkv": "attn.c_attn",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
)
