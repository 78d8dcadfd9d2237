"""Sarvam 105B: DeepSeek-V3 under other names."""

from megatron_core.hub.hugging_face.families.deepseek import LATENT_POSITIONS
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings


def _positions(hf_config: Settings) -> Settings:
    """The authors' ``head_dim`` is the size of a cached latent, and their ``deepseek_yarn`` is YaRN."""
    keys = {key: value for key, value in hf_config.items() if key != "head_dim"}
    scaling = keys.get("rope_scaling") or {}
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        keys["rope_scaling"] = {**scaling, "type": "yarn", "rope_type": "yarn"}
    return {**LATENT_POSITIONS.read(keys), **ROPE.read(keys)}


POSITIONS = KeyRule(
    read=_positions,
    write=lambda config: {**ROPE.write(config), **LATENT_POSITIONS.write(config)},
    types={**ROPE.types, **LATENT_POSITIONS.types},
)
