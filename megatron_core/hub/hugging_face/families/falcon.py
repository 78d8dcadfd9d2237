"""Falcon: attention and MLP in parallel, with one norm or two, and one or a few key and value heads."""

from megatron_core.config import ModelConfig
from megatron_core.foreign_json import COUNT, SWITCH
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse
from megatron_core.hub.hugging_face.tensors import RowRange


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


def rows_of_norm(config: ModelConfig, count: int) -> list[RowRange]:
    """A norm whose name depends on whether attention and MLP in parallel have two."""
    return [RowRange(_has_two_norms(config), 0, count)]


def _has_two_norms(config: ModelConfig) -> bool:
    return config.parallel_residual and not config.parallel_residual_shared_norm


LAYER_TYPES = {
    **dict.fromkeys(("new_decoder_architecture", "parallel_attn", "multi_query", "bias"), SWITCH),
    **dict.fromkeys(("num_ln_in_parallel_attn", "num_kv_heads"), COUNT),
}
LAYERS = KeyRule(_layers, _layers_json, LAYER_TYPES)
