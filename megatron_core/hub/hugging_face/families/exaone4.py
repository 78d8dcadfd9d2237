"""K-EXAONE: experts as those of DeepSeek-V3, with another name for the number of shared ones."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.rules import KeyRule, Settings, dense_first

_FIRST_LAYERS = dense_first(dense=1, shared=1)


def _first_layers_json(config: ModelConfig) -> Settings:
    keys = _FIRST_LAYERS.write(config)
    return {"first_k_dense_replace": keys["first_k_dense_replace"], "num_shared_experts": keys["n_shared_experts"]}


FIRST_LAYERS = KeyRule(_FIRST_LAYERS.read, _first_layers_json, _FIRST_LAYERS.types)
