"""Falcon: attention and MLP in parallel, with one norm or two, and one or a few key and value heads."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import register
from megatron_core.hub.hugging_face.families.gpt_neox import GPT_NEOX
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings, gelu, refuse
from megatron_core.hub.hugging_face.tensors import RowRange, TensorSource
from megatron_core.schema import COUNT, SWITCH


def _layers(hf_config: Settings) -> Settings:
    """The later architecture, of Falcon 40B, has groups of heads, and by default two norms in parallel."""
    later = hf_config.get("new_decoder_architecture", False)
    parallel = hf_config.get("parallel_attn", True)
    norms = hf_config.get("num_ln_in_parallel_attn", 2 if later else 1)
    if later and not parallel:
        refuse("parallel_attn", False, "new_decoder_architecture=true has attention and MLP in parallel")
    if norms not in ((1, 2) if later else (1,)):
        refuse("num_ln_in_parallel_attn", norms, "supported are 1, and 2 with new_decoder_architecture")
    heads = hf_config["num_attention_heads"]
    earlier_groups = 1 if hf_config.get("multi_query", True) else heads
    groups = hf_config.get("num_kv_heads", heads) if later else earlier_groups
    grouped = {} if groups == heads else {"group_query_attention": True, "num_query_groups": groups}
    return {
        **grouped,
        "disable_bias_linear": not hf_config.get("bias", False),
        "parallel_residual": parallel,
        "parallel_residual_shared_norm": parallel and norms == 1,
    }


def _layers_json(config: ModelConfig) -> Settings:
    later = _has_two_norms(config) or config.query_groups not in (1, config.num_attention_heads)
    return {
        "new_decoder_architecture": later,
        "parallel_attn": config.parallel_residual,
        "num_ln_in_parallel_attn": 2 if _has_two_norms(config) else 1,
        "num_kv_heads": config.query_groups,
        "multi_query": config.query_groups == 1,
        "bias": config.add_bias_linear,
    }


def _norm(alone: str, parallel: str) -> TensorSource:
    """A norm whose name depends on whether attention and MLP in parallel have two."""
    return TensorSource((alone, parallel), lambda config, count: [RowRange(_has_two_norms(config), 0, count)])


def _has_two_norms(config: ModelConfig) -> bool:
    return config.parallel_residual and not config.parallel_residual_shared_norm


LAYER_TYPES = {
    **dict.fromkeys(("new_decoder_architecture", "parallel_attn", "multi_query", "bias"), SWITCH),
    **dict.fromkeys(("num_ln_in_parallel_attn", "num_kv_heads"), COUNT),
}
FALCON = register(
    GPT_NEOX,
    model_type="falcon",
    class_name="FalconForCausalLM",
    base="transformer.",
    keys={
        **{
            key: name
            for key, name in GPT_NEOX.keys.items()
            if key not in ("intermediate_size", "layer_norm_eps", "use_parallel_residual")
        },
        "ffn_hidden_size": "ffn_hidden_size",
        "layer_norm_epsilon": "norm_epsilon",
    },
    aliases={"n_embed": "hidden_size"},
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    required={"alibi": False, "apply_residual_connection_post_layernorm": False},
    rules=(ROPE, gelu("activation", "gelu"), KeyRule(_layers, _layers_json, LAYER_TYPES)),
    tensors={
        "embedding.word_embeddings": "transformer.word_embeddings",
        "decoder.final_layernorm": "transformer.ln_f",
        "output_layer": "lm_head",
    },
    layer_prefix="transformer.h.{n}.",
    layer_tensors={
        **GPT_NEOX.layer_tensors,
        "input_layernorm": _norm("input_layernorm", "ln_attn"),
        "self_attention.linear_qkv": "self_attention.query_key_value",  # of each group in turn, too
        "self_attention.linear_proj": "self_attention.dense",
        "pre_mlp_layernorm": _norm("post_attention_layernorm", "ln_mlp"),
    },
    derived=r"h\.\d+\.self_attention\.(maybe_rotary|rotary_emb)\.inv_freq",
)
