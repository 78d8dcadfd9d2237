"""Hunyuan: Llama with norms of queries and keys after their rotation; with experts and a shared one, too."""

from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings, refuse, rope_parameters, rope_type
from megatron_core.schema import COUNT, COUNTS, POSITIVE, KeyType


def _positions(hf_config: Settings) -> Settings:
    """With ``alpha``, the positions called dynamic have the base rope_theta * alpha^(d / (d - 2)) at every length."""
    rope = rope_parameters(hf_config)
    if rope_type(rope) != "dynamic" or not rope.get("alpha"):
        return ROPE.read(hf_config)
    channels = hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]
    plain = ROPE.read({**hf_config, "rope_scaling": None, "rope_parameters": {**rope, "rope_type": "default"}})
    return {**plain, "rotary_base": plain["rotary_base"] * rope["alpha"] ** (channels / (channels - 2))}


POSITIONS = KeyRule(_positions, ROPE.write, {**ROPE.types, "alpha": POSITIVE})


def _experts(hf_config: Settings) -> Settings:
    """Every layer chooses ``moe_topk`` experts, one number or a list; a shared one has their width."""
    chosen = hf_config["moe_topk"]
    numbers = set(chosen) if isinstance(chosen, list) else {chosen}
    if len(numbers) != 1:
        refuse("moe_topk", chosen, "the same number for all layers is supported")
    return {
        "moe_router_topk": min(numbers),
        "moe_shared_expert_intermediate_size": hf_config["intermediate_size"],
    }


COUNT_OR_COUNTS = KeyType(f"{COUNT.description}, or a list of them", lambda x: COUNT.accepts(x) or COUNTS.accepts(x))
EXPERTS = KeyRule(_experts, lambda config: {"moe_topk": config.moe_router_topk}, {"moe_topk": COUNT_OR_COUNTS})
