"""Qwen2, Qwen2.5: Llama with biases of queries, keys and values. Qwen3: with norms instead. Qwen2-MoE and Qwen3-MoE:
with experts, the former also with a shared expert and its gate."""

from megatron_core.config import ModelConfig
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.foreign_json import COUNT, COUNT_OR_ZERO, COUNTS, SWITCH
from megatron_core.hub.hugging_face.rules import WINDOW_OF_ALL_LAYERS, WINDOWS, KeyRule, Settings, refuse, windows_where

WINDOWS_OF_LAST_LAYERS = windows_where(
    lambda keys, layer: bool(layer >= keys["max_window_layers"]), max_window_layers=COUNT_OR_ZERO
)


def _windows(hf_config: Settings) -> Settings:
    """Layers from ``max_window_layers`` on have a window if ``use_sliding_window`` is set."""
    if not hf_config.get("use_sliding_window", False):
        if "sliding_attention" in hf_config.get("layer_types", ()):
            refuse("use_sliding_window", False, "but layer_types has sliding_attention")
        return {}
    return WINDOWS_OF_LAST_LAYERS.read(hf_config)


def _windows_of_all_layers(hf_config: Settings) -> Settings:
    return WINDOW_OF_ALL_LAYERS.read(hf_config) if hf_config.get("use_sliding_window", False) else {}


def windows_json(config: ModelConfig) -> Settings:
    """The keys of ``WINDOWS``, and ``use_sliding_window``."""
    return WINDOWS.write(config) | {"use_sliding_window": config.window_size is not None}


def _windows_of_qwen2_moe(hf_config: Settings) -> Settings:
    """Every second one of the first ``max_window_layers`` has a window if ``use_sliding_window`` is set."""
    if not hf_config.get("use_sliding_window", False):
        return _windows(hf_config)
    return windows_where(lambda keys, layer: layer % 2 == 0 and layer < keys["max_window_layers"]).read(hf_config)


def _expert_layers(hf_config: Settings) -> Settings:
    """Every n-th layer, ``decoder_sparse_step``, has experts, but those of ``mlp_only_layers``."""
    dense = hf_config.get("mlp_only_layers", [])
    every = hf_config.get("decoder_sparse_step", 1)
    layers = range(hf_config["num_hidden_layers"])
    return {"moe_layer_freq": tuple(int(n not in dense and (n + 1) % every == 0) for n in layers)}


def _expert_layers_json(config: MoEConfig) -> Settings:
    dense = [n for n in range(config.num_layers) if not config.has_experts(n)]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = KeyRule(_expert_layers, _expert_layers_json, {"mlp_only_layers": COUNTS, "decoder_sparse_step": COUNT})
WINDOW_TYPES = {**WINDOWS_OF_LAST_LAYERS.types, "use_sliding_window": SWITCH}
QWEN_WINDOWS = KeyRule(_windows, windows_json, WINDOW_TYPES)
QWEN_MOE_WINDOWS = KeyRule(_windows_of_all_layers, windows_json, WINDOW_TYPES)
QWEN2_MOE_WINDOWS = KeyRule(_windows_of_qwen2_moe, windows_json, WINDOW_TYPES)
ROUTER_SOFTMAX = KeyRule(
    read=lambda hf_config: {"moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False)},
    write=lambda config: {"norm_topk_prob": not config.moe_router_pre_softmax},
    types={"norm_topk_prob": SWITCH},
)
