"""``--depth N``: one number gives the shape, learning rate, batch size and length of training of a model.

The width grows with the depth, so that one family of models spans all sizes, and maximal update parametrisation keeps
the learning rate that was found for the narrow ones. Every value is a default, which other flags replace.
"""

import math
from collections.abc import Collection
from typing import Any

from megatron_core.errors import ConfigError, shortened

HEAD_SIZE = 64
BASE_DEPTH = 4
DEEPEST = 1024
"""Channels of a head, of which a model has as many as layers; the depth whose learning rate is ``LEARNING_RATE``."""
SEQUENCE = 2048
TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022 (arXiv 2203.15556), table 3."""
LEARNING_RATE = 1e-3
"""AdamW's at the base width; see docs/model_size.md for the runs."""


ALTERNATIVES = {
    "squared_relu": ("swiglu", "geglu", "quick_geglu", "relu", "xielu", "openai_gelu"),
    "train_iters": ("train_samples",),
    "lr_warmup_fraction": ("lr_warmup_iters", "lr_warmup_samples"),
    "use_mup": ("no_use_mup", "multi_latent_attention", "experimental_attention_variant", "hybrid_layer_pattern"),
}
"""Settings that --depth chooses, each with the settings that exclude it."""


def batch_tokens(parameters: int, tokens: float) -> float:
    """Tokens of a batch: 0.292 C^0.3271 for C = 6 parameters tokens FLOP.

    Source: DeepSeek-AI 2024 (arXiv 2401.02954), section 3.1.
    """
    return float(0.2920 * (6.0 * parameters * tokens) ** 0.3271)


def read_depth(text: str, names: Collection[str]) -> tuple[dict[str, Any], str]:
    """The settings of the flag's value, without a note. Errors: ``ConfigError``."""
    try:
        depth = int(text)
    except ValueError:
        raise ConfigError(f"depth={shortened(text)} is not an integer; legal: 1 to {DEEPEST}") from None
    return settings_of_depth(depth, names), ""


def settings_of_depth(depth: int, set_names: Collection[str] = ()) -> dict[str, Any]:
    """The settings of the model of ``depth`` layers, except those that the settings ``set_names`` exclude.

    Errors: ``ConfigError`` for a depth out of range.

    Width 64 depth, ``depth`` heads, MLP width 4 times the width; N = 12 depth width^2 parameters, and 20 N tokens.
    """
    if not 1 <= depth <= DEEPEST:
        raise ConfigError(f"depth={depth} is out of range; legal: 1 to {DEEPEST}")
    width = HEAD_SIZE * depth
    parameters = 12 * depth * width**2
    tokens = TOKENS_PER_PARAMETER * parameters
    # A power of 2 sequences, which many layouts divide.
    batch = 2 ** max(round(math.log2(batch_tokens(parameters, tokens) / SEQUENCE)), 0)
    settings = {
        "num_layers": depth,
        "hidden_size": width,
        "num_attention_heads": depth,
        "ffn_hidden_size": 4 * width,
        "squared_relu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_mup": True,
        "mup_base_hidden_size": HEAD_SIZE * BASE_DEPTH,
        "mup_base_head_dim": float(HEAD_SIZE),
        "seq_length": SEQUENCE,
        "max_position_embeddings": SEQUENCE,
        "global_batch_size": batch,
        "train_iters": -(-tokens // (batch * SEQUENCE)),
        "lr": LEARNING_RATE,
        "min_lr": LEARNING_RATE / 10.0,
        "lr_decay_style": "cosine",
        "lr_warmup_fraction": 0.02,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
    }
    excluded = {name for name, alternatives in ALTERNATIVES.items() if not set(alternatives).isdisjoint(set_names)}
    if "use_mup" in excluded:
        excluded |= {"mup_base_hidden_size", "mup_base_head_dim"}
    return {name: value for name, value in settings.items() if name not in excluded}
