"""EXAONE 4: norms behind attention and MLP, norms of queries and keys, and positions only in layers with a window."""

from megatron_core.config import ModelConfig
from megatron_core.models.hf.architecture import register
from megatron_core.models.hf.families.llama import LLAMA, QK_NORMS
from megatron_core.models.hf.families.olmo2 import OLMO2
from megatron_core.models.hf.rules import COUNT_OR_ZERO, ROPE, WINDOWS, KeyType, Rule, Settings, refuse

PATTERN = KeyType("a string or an integer >= 0", lambda value: isinstance(value, str) or COUNT_OR_ZERO.accepts(value))


def _windows(hf_config: Settings) -> Settings:
    """Every n-th layer, ``sliding_window_pattern``, has neither window nor positions; without windows all have them."""
    if hf_config.get("sliding_window") is None:
        return {}
    every, layers = hf_config.get("sliding_window_pattern", 4), hf_config["num_hidden_layers"]
    if "layer_types" not in hf_config and (isinstance(every, str) or every == 0):
        refuse("sliding_window_pattern", every, "without layer_types it must be an integer >= 1")
    kinds = hf_config.get("layer_types") or [
        "full_attention" if n % every == 0 else "sliding_attention" for n in range(1, layers + 1)
    ]
    without = tuple(int(kind == "full_attention") for kind in kinds)
    return {**WINDOWS.read({**hf_config, "layer_types": kinds}), "no_rope_freq": without if any(without) else None}


def _windows_json(config: ModelConfig) -> Settings:
    return {"layer_types": ["full_attention"] * config.num_layers, **WINDOWS.write(config)}


EXAONE4 = register(
    OLMO2,
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    keys=LLAMA.keys,
    fixed={**LLAMA.fixed, "qk_layernorm": True, "norm_placement": "post"},
    defaults={"num_key_value_heads": 32, "sliding_window": 4096},
    required={"hidden_act": "silu"},
    rules=(ROPE, Rule(_windows, _windows_json, {**WINDOWS.types, "sliding_window_pattern": PATTERN})),
    layer_tensors={**OLMO2.layer_tensors, **QK_NORMS},
)
