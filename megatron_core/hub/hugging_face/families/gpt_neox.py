"""GPT-NeoX and Pythia: rotary positions in a part of each head's channels, with keys of their own."""

from dataclasses import replace

from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE

POSITIONS = replace(
    PARTIAL_ROPE,
    write=lambda config: {
        "rotary_pct": config.rotary_percent,
        "rotary_emb_base": config.rotary_base,
        "rope_scaling": PARTIAL_ROPE.write(config)["rope_scaling"],
    },
)
