"""Rules for layers with sizes of their own."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_core.config.model import ModelConfig
from megatron_core.config.rule_helpers import uneven
from megatron_core.config.rules_attention import model_problems
from megatron_core.config.rules_parallel import parallel_problems
from megatron_core.config.run import RunConfig
from megatron_core.feature import used_features
from megatron_core.features.layer_sizes.settings import LAYERS_JSON as NAME
from megatron_core.features.layer_sizes.settings import MODEL_KEYS, HeterogeneousConfig, read_blocks

NO_SIZES: dict[str, Any] = {NAME: None}
"""Settings of a model whose layers have the same sizes."""


def heterogeneous_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Faults of the JSON, other settings that it excludes, and sizes of a layer that the layout cannot split."""
    model = config.model
    text = config.model.section(HeterogeneousConfig).heterogeneous_layers_config_encoded_json
    if text is None or min(model.hidden_size, model.num_attention_heads) < 1:
        return
    blocks, faults = read_blocks(text, model.hidden_size, model.num_attention_heads)
    yield from (f"{NAME} {fault}" for fault in faults)
    yield from _excluded(config)
    if not blocks:
        return
    if len(blocks) != model.num_layers:
        yield f"{NAME} has {len(blocks)} layers, but num_layers={model.num_layers}; give --num-layers {len(blocks)}"
    if all(block.is_empty for block in blocks):
        yield f"{NAME} has only layers without attention and MLP; remove no_op from one of them"
    yield from _other_keys(text, model)
    tp = config.parallel.tensor_model_parallel_size
    if tp > 1 and any(sublayer.linear for block in blocks for sublayer in (block.attention, block.mlp)):
        yield from uneven("hidden_size", model.hidden_size, "tensor_model_parallel_size", tp)
    # Each layer must be legal as the layers of a model that has its sizes everywhere.
    reported = set(_of_sizes(config, replace(model, **NO_SIZES), world_size))
    for number, sized in _models_of_one_size(model):
        problems_of_layer = (fault for fault in _of_sizes(config, sized, world_size) if fault not in reported)
        yield from (f"block_configs[{number}] of {NAME}: {fault}" for fault in problems_of_layer)


@lru_cache(maxsize=64)  # a search over layouts checks the same model in thousands of them
def _models_of_one_size(model: ModelConfig) -> tuple[tuple[int, ModelConfig], ...]:
    """The first layer of each pair of sizes, and a model that has them in all its layers."""
    first: dict[ModelConfig, int] = {}
    for number in range(min(len(model.section(HeterogeneousConfig).blocks), model.num_layers)):
        first.setdefault(model.of_layer(number), number)
    return tuple((number, replace(layer_model, **NO_SIZES)) for layer_model, number in first.items())


def _of_sizes(config: RunConfig, model: ModelConfig, world_size: int) -> Iterator[str]:
    uniform = replace(config, model=model)
    yield from model_problems(uniform)
    yield from parallel_problems(uniform, world_size)
    for feature in used_features(uniform):
        if feature.problems is not None and feature.problems is not heterogeneous_problems:
            yield from feature.problems(uniform, world_size)


def _excluded(config: RunConfig) -> Iterator[str]:
    """Settings whose layers have sizes of their own, or that change the parts of a layer."""
    model = config.model
    excluded = {
        "num_experts": config.optional("num_experts"),
        "multi_latent_attention": config.optional("multi_latent_attention"),
        "experimental_attention_variant": model.experimental_attention_variant,
        "hybrid_layer_pattern": config.optional("hybrid_layer_pattern"),
        "mtp_num_layers": model.added_layers,
        "parallel_residual": model.parallel_residual,
        "layout_invariant": config.parallel.layout_invariant,
    }
    for name, value in excluded.items():
        if value:
            yield f"{name}={value} cannot be used with {NAME}; remove one of them"
    if model.attention_kind != "grouped_query":
        yield f"attention_kind={model.attention_kind} cannot be used with {NAME}; remove one of them"


def _other_keys(text: str, model: ModelConfig) -> Iterator[str]:
    """Keys of the JSON about the whole model that differ from the settings."""
    content = json.loads(text)
    for key, name in MODEL_KEYS.items():
        if key in content and content[key] != getattr(model, name):
            yield f"{NAME} has {key}={content[key]}, but {name}={getattr(model, name)}; change one of them"
    if content.get("hidden_act", "silu") != "silu" or ("hidden_act" in content and not model.swiglu):
        yield f"{NAME} has hidden_act={content['hidden_act']}, but swiglu={model.swiglu}; legal: silu with --swiglu"
    tied = model.share_embeddings_and_output_weights
    if content.get("tie_word_embeddings", tied) != tied:
        yield (
            f"{NAME} has tie_word_embeddings={content['tie_word_embeddings']}, but untie_embeddings_and_output_weights="
            f"{not tied}; change one of them"
        )
