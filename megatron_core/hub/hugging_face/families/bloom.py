"""MPT: linear biases of scores instead of positions."""

from megatron_core.config import ModelConfig
from megatron_core.foreign_json import NUMBER, OBJECT, POSITIVE
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, refuse

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


ATTENTION_OF_MPT = KeyRule(
    _attention, _attention_json, {"attn_config": OBJECT, "softmax_scale": POSITIVE, "attn_pdrop": NUMBER}
)
