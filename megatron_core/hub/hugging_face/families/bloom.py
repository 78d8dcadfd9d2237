"""BLOOM and MPT: linear biases of scores instead of positions."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import Architecture, register
from megatron_core.hub.hugging_face.families.gpt_neox import GPT_NEOX
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import stacked_qkv
from megatron_core.schema import NUMBER, OBJECT, POSITIVE

BLOOM = register(
    Architecture(
        model_type="bloom",
        class_name="BloomForCausalLM",
        base="transformer.",
        keys={
            "n_layer": "num_layers",
            "hidden_size": "hidden_size",
            "n_head": "num_attention_heads",
            "layer_norm_epsilon": "norm_epsilon",
            "initializer_range": "init_method_std",
            "hidden_dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
        },
        fixed={"position_embedding_type": "alibi", "embedding_layernorm": True, "openai_gelu": True},
        aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        required={"apply_residual_connection_post_layernorm": False},
        unread=frozenset(
            {"offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "masked_softmax_fusion", "bias_dropout_fusion"}
            | {"slow_but_exact"}
        ),
        tensors={
            "embedding.word_embeddings": "transformer.word_embeddings",
            "embedding.norm": "transformer.word_embeddings_layernorm",
            "decoder.final_layernorm": "transformer.ln_f",
            "output_layer": "lm_head",
        },
        layer_prefix="transformer.h.{n}.",
        layer_tensors={
            **GPT_NEOX.layer_tensors,
            "self_attention.linear_qkv": "self_attention.query_key_value",
            "self_attention.linear_proj": "self_attention.dense",
        },
    )
)

ONLY = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
}
"""The only supported values in ``attn_config``."""


def _attention(hf_config: Settings) -> Settings:
    """``attn_config``; other numbers of heads than powers of 2 have slopes in another order."""
    attention = hf_config.get("attn_config") or {}
    heads = hf_config["n_heads"]
    for key, only in ONLY.items():
        if attention.get(key, only) != only:
            refuse(f"attn_config.{key}", attention[key], f"for mpt only {only!r} is supported")
    if heads & (heads - 1):
        refuse("n_heads", heads, "for mpt a power of 2 is supported: others have slopes in another order")
    dropout = attention.get("attn_pdrop") or 0.0
    return {"softmax_scale": attention.get("softmax_scale"), "hidden_dropout": dropout, "attention_dropout": dropout}


def _attention_json(config: ModelConfig) -> Settings:
    heads = config.num_attention_heads
    if heads & (heads - 1):
        refuse("n_heads", heads, "for mpt a power of 2 is supported: others have slopes in another order")
    # transformers reads a dropout of attention only as an integer.
    return {"attn_config": {**ONLY, "softmax_scale": config.softmax_scale, "attn_pdrop": 0}}


MPT = register(
    Architecture(
        model_type="mpt",
        class_name="MptForCausalLM",
        base="transformer.",
        keys={
            "n_layers": "num_layers",
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "layer_norm_epsilon": "norm_epsilon",
            "max_seq_len": "max_position_embeddings",
            "initializer_range": "init_method_std",
        },
        fixed={
            "position_embedding_type": "alibi",
            "disable_bias_linear": True,
            "disable_bias_layernorm": True,
        },
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        required={"expansion_ratio": 4, "no_bias": True, "logit_scale": None},
        unread=frozenset(
            {"learned_pos_emb", "init_device", "init_config", "embedding_fraction", "norm_type", "emb_pdrop", "verbose"}
            | {"tokenizer_name", "resid_pdrop", "attn_impl", *ONLY}
        ),
        rules=(
            KeyRule(
                _attention,
                _attention_json,
                {"attn_config": OBJECT, "softmax_scale": POSITIVE, "attn_pdrop": NUMBER},
            ),
        ),
        tensors={
            "embedding.word_embeddings": "transformer.wte",
            "decoder.final_layernorm": "transformer.norm_f",
            "output_layer": "lm_head",
        },
        layer_prefix="transformer.blocks.{n}.",
        layer_tensors={
            "input_layernorm": "norm_1",
            "self_attention.linear_qkv": stacked_qkv("attn.Wqkv"),
            "self_attention.linear_proj": "attn.out_proj",
            "pre_mlp_layernorm": "norm_2",
            "mlp.linear_fc1": "ffn.up_proj",
            "mlp.linear_fc2": "ffn.down_proj",
        },
    )
)
