"""MiniCPM3: latent attention, and factors on embeddings, logits and the outputs of layers."""

from math import sqrt

from megatron_core.config import ModelConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.foreign_json import POSITIVE, WIDTH
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings
from megatron_core.hub.hugging_face.tensors import RowRange

ORIGINAL = "original_max_position_embeddings"


def _positions_json(config: ModelConfig) -> Settings:
    """With the original number of positions next to the factors of LongRoPE, as in published files."""
    keys = ROPE.write(config)
    original = {key: keys.pop(key) for key in (ORIGINAL,) if key in keys}
    return keys | {"rope_scaling": keys["rope_scaling"] | original} if original else keys


def _factors(hf_config: Settings) -> Settings:
    width = hf_config["hidden_size"]
    return {
        "residual_multiplier": hf_config["scale_depth"] / sqrt(hf_config["num_hidden_layers"]),
        "logit_multiplier": hf_config["dim_model_base"] / width,
        "v_head_dim": hf_config.get("v_head_dim", width // hf_config["num_attention_heads"]),
    }


def _factors_json(config: ModelConfig) -> Settings:
    """Also ``v_head_dim``, which config.json may leave out."""
    root = sqrt(config.num_layers)
    depth = config.residual_multiplier * root
    rounded = float(f"{depth:.12g}")  # 1.4 instead of 1.4000000000000001
    base = config.logit_multiplier * config.hidden_size
    return {
        "scale_depth": rounded if rounded / root == config.residual_multiplier else depth,
        "dim_model_base": round(base),
        "v_head_dim": config.section(LatentAttentionConfig).v_head_dim,
    }


POSITIONS = KeyRule(ROPE.read, _positions_json, ROPE.types)
FACTORS = KeyRule(_factors, _factors_json, {"scale_depth": POSITIVE, "dim_model_base": WIDTH, "v_head_dim": WIDTH})


def _rotated(first: int, count: int) -> list[RowRange]:
    """Rows of rotated channels, of which the stored first and second halves form pairs; ours are adjacent."""
    half = count // 2
    return [RowRange(0, row, first + count, half) for row in range(first, first + half)]


def rows_of_queries(config: ModelConfig, count: int) -> list[RowRange]:
    """The other channels of each head, then its rotated ones."""
    latent = config.section(LatentAttentionConfig)
    size = latent.qk_head_dim + latent.qk_pos_emb_head_dim
    ranges = []
    for first in range(0, count, size):
        rotated = first + latent.qk_head_dim
        ranges += [RowRange(0, first, rotated), *_rotated(rotated, latent.qk_pos_emb_head_dim)]
    return ranges


def rows_of_latents(config: ModelConfig, count: int) -> list[RowRange]:
    """The latent of keys and values, then the rotated channels of the keys of all heads."""
    rotated = config.section(LatentAttentionConfig).qk_pos_emb_head_dim
    return [RowRange(0, 0, count - rotated), *_rotated(count - rotated, rotated)]
