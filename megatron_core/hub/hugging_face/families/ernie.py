"""ERNIE 4.5: Llama with rotary positions of adjacent channels; with experts that are chosen by a softmax and a bias."""

from megatron_core.features.experts.settings import MoEConfig
from megatron_core.foreign_json import COUNT, COUNT_OR_ZERO, KeyType
from megatron_core.hub.hugging_face.rules import KeyRule, Settings

INTEGER = KeyType("an integer", lambda value: type(value) is int)


def _layers(hf_config: Settings) -> Settings:
    """Every n-th layer from a first to a last one has experts; -1 is the last layer of the model."""
    layers = hf_config["num_hidden_layers"]
    every = hf_config["moe_layer_interval"]
    first = hf_config["moe_layer_start_index"]
    last_layer = hf_config["moe_layer_end_index"]
    last_layer = layers - 1 if last_layer == -1 else last_layer
    shared = hf_config["moe_num_shared_experts"] * hf_config["moe_intermediate_size"]
    return {
        "moe_layer_freq": tuple(int((n + 1) % every == 0 and first <= n <= last_layer) for n in range(layers)),
        "moe_shared_expert_intermediate_size": shared or None,
    }


def _layers_json(config: MoEConfig) -> Settings:
    sparse = config.expert_layers
    shared = config.moe_shared_expert_intermediate_size or 0
    return {
        "moe_layer_start_index": sparse[0] if sparse else config.num_layers,
        "moe_layer_end_index": sparse[-1] if sparse else config.num_layers,
        "moe_layer_interval": sparse[1] - sparse[0] if len(sparse) > 1 else 1,
        "moe_num_shared_experts": shared // config.expert_ffn_size,
    }


LAYERS = KeyRule(
    _layers,
    _layers_json,
    {
        "moe_layer_start_index": COUNT_OR_ZERO,
        "moe_layer_end_index": INTEGER,
        "moe_layer_interval": COUNT,
        "moe_num_shared_experts": COUNT_OR_ZERO,
    },
)
