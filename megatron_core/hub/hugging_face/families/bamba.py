"""Bamba: layers of a Mamba-2 mixer or attention, and an MLP, which are two layers each here."""

from megatron_core.config import ModelConfig
from megatron_core.features.output_losses.settings import OutputLossConfig
from megatron_core.features.recurrent.kinds import Mamba2
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.foreign_json import COUNT, COUNTS, NUMBER, WIDTH, KeyType
from megatron_core.hub.hugging_face.rules import PARTIAL_ROPE, KeyRule, Settings, refuse

HEAD_SIZE = KeyType("an integer >= 1, or auto", lambda value: value == "auto" or COUNT.accepts(value))
ROTATED = 0.5
"""Share of a head's channels with rotary positions, whatever config.json says."""
MIXER_KEYS = {
    "mamba_n_groups": "mamba_num_groups",
    "mamba_d_state": "mamba_state_dim",
    "mamba_d_conv": "linear_conv_kernel_dim",
}
"""Keys of Mamba-2 mixers -> settings with the same meaning."""


def mixer_sizes(hf_config: Settings) -> Settings:
    """Number and channels of the heads of Mamba-2 mixers."""
    heads = hf_config["mamba_n_heads"]
    inner = hf_config["mamba_expand"] * hf_config["hidden_size"]
    size = inner // heads if hf_config["mamba_d_head"] == "auto" else hf_config["mamba_d_head"]
    if size * heads != inner:
        refuse("mamba_d_head", size, f"mamba_n_heads={heads} x mamba_d_head must be mamba_expand x hidden_size={inner}")
    return {"mamba_num_heads": heads, "mamba_head_dim": size}


def mixer_sizes_json(config: ModelConfig) -> Settings:
    """The inverse of ``mixer_sizes``."""
    sizes = Mamba2(config)
    return {
        "mamba_expand": sizes.heads * sizes.value_head_size // config.hidden_size,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": config.section(RecurrentConfig).mamba_head_dim,
    }


MIXER_TYPES = {
    **dict.fromkeys(("num_hidden_layers", "mamba_n_heads", "mamba_n_groups", "mamba_d_conv", "mamba_expand"), COUNT),
    **{"mamba_d_state": WIDTH, "mamba_d_head": HEAD_SIZE},
}


def _layers(hf_config: Settings) -> Settings:
    layers = hf_config["num_hidden_layers"]
    attention = hf_config.get("attn_layer_indices") or []
    pattern = "".join("*-" if n in attention else "M-" for n in range(layers))
    return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern, **mixer_sizes(hf_config)}


def _layers_json(config: ModelConfig) -> Settings:
    pattern = config.section(RecurrentConfig).hybrid_layer_pattern or ""
    return {
        "num_hidden_layers": config.num_layers // 2,
        "attn_layer_indices": [n // 2 for n, letter in enumerate(pattern) if letter == "*"],
        **mixer_sizes_json(config),
    }


def _rope(hf_config: Settings) -> Settings:
    settings = PARTIAL_ROPE.read({"partial_rotary_factor": ROTATED, **hf_config})
    if settings["rotary_percent"] != ROTATED:
        refuse("partial_rotary_factor", settings["rotary_percent"], f"for bamba only {ROTATED} is supported")
    return settings


POSITIONS = KeyRule(_rope, PARTIAL_ROPE.write, PARTIAL_ROPE.types)
LAYERS = KeyRule(_layers, _layers_json, {**MIXER_TYPES, "attn_layer_indices": COUNTS})
Z_LOSS = KeyRule(
    read=lambda hf_config: {"output_z_loss_coeff": float(hf_config["z_loss_coefficient"])},
    write=lambda config: {"z_loss_coefficient": config.section(OutputLossConfig).output_z_loss_coeff},
    types={"z_loss_coefficient": NUMBER},
)
