"""GPTBigCode (StarCoder 1): GPT-2 with one head of keys and values."""

from megatron_core.foreign_json import SWITCH
from megatron_core.hub.hugging_face.rules import KeyRule, Settings


def _key_heads(hf_config: Settings) -> Settings:
    """One head of keys and values for all queries, or one for each."""
    is_shared = hf_config.get("multi_query", True) and hf_config["n_head"] > 1
    return {"group_query_attention": True, "num_query_groups": 1} if is_shared else {}


KEY_HEADS = KeyRule(_key_heads, lambda config: {"multi_query": config.query_groups == 1}, {"multi_query": SWITCH})
