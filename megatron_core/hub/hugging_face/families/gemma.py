"""Gemma 1: Llama with GELU and scaled embeddings. Gemma 2 and Gemma 3 (text): four norms a layer, windows in some
layers, bounded scores and logits."""

from dataclasses import replace

from megatron_core.config import ModelConfig
from megatron_core.foreign_json import COUNT, OBJECT, POSITIVE, STRING
from megatron_core.hub.hugging_face.families.mistral import windows_with_size_json
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, Settings, refuse, windows_where


def _has_window(hf_config: Settings, layer: int) -> bool:
    """Every n-th layer, ``sliding_window_pattern``, has no window."""
    every = 2 if hf_config["model_type"] in ("gemma2", "vaultgemma") else hf_config.get("sliding_window_pattern", 6)
    return (layer + 1) % every != 0


def rope_by_layer_type(hf_config: Settings) -> Settings:
    """Rotary positions of layers with and without a window, as transformers 5 (``rope_parameters``) or earlier releases
    write them."""
    by_type: Settings = hf_config.get("rope_parameters") or {}
    full, local = (by_type.get(f"{layer_type}_attention") or {} for layer_type in ("full", "sliding"))
    full = full | (hf_config.get("rope_scaling") or {})
    if local.get("rope_type", "default") != "default":
        refuse("rope_type", local["rope_type"], "for sliding_attention only default is supported")
    base = ROPE.read({"rope_parameters": local, "rope_theta": hf_config["rope_local_base_freq"]})["rotary_base"]
    return {**ROPE.read({**hf_config, "rope_parameters": full, "rope_scaling": None}), "rotary_base_of_windows": base}


def _rope_by_layer_type_json(config: ModelConfig) -> Settings:
    local = {} if config.rotary_base_of_windows is None else {"rope_local_base_freq": config.rotary_base_of_windows}
    return ROPE.write(config) | local


WINDOWS = replace(windows_where(_has_window, sliding_window_pattern=COUNT), write=windows_with_size_json)
ROPE_TYPES = {**ROPE.types, "rope_local_base_freq": POSITIVE, "full_attention": OBJECT, "sliding_attention": OBJECT}
POSITIONS = KeyRule(rope_by_layer_type, _rope_by_layer_type_json, ROPE_TYPES)
SOFTMAX_SCALE = KeyRule(
    read=lambda hf_config: {"softmax_scale": hf_config["query_pre_attn_scalar"] ** -0.5},
    write=lambda config: {"query_pre_attn_scalar": round((config.softmax_scale or config.head_size**-0.5) ** -2)},
    types={"query_pre_attn_scalar": POSITIVE},
)


def _gelu(hf_config: Settings) -> Settings:
    """The approximation by tanh, also if a file names the exact one, as the first files did by mistake."""
    name = hf_config.get("hidden_act", "gelu_pytorch_tanh")
    return (
        {} if name in ("gelu", "gelu_pytorch_tanh") else refuse("hidden_act", name, "for gemma only GELU is supported")
    )


ACTIVATION = KeyRule(_gelu, lambda _: {"hidden_act": "gelu_pytorch_tanh"}, {"hidden_act": STRING})
