"""Granite with windows and sinks, dense and with experts; layers may have another rotary base, or no positions."""

from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.families.mistral import WINDOWS_OF_THREE_IN_FOUR
from megatron_core.hub.hugging_face.rules import FACTORS as NUMBERS
from megatron_core.hub.hugging_face.rules import ROPE, KeyRule, KeyType, Settings, refuse

BASES = KeyType(
    "a list of numbers >= 0", lambda x: isinstance(x, list) and NUMBERS.accepts([base for base in x if base])
)


def _positions(hf_config: Settings) -> Settings:
    """``layer_rope_theta``: the rotary base of each layer, 0 for none."""
    settings = ROPE.read(hf_config)
    windows = WINDOWS_OF_THREE_IN_FOUR.read(hf_config)
    bases = hf_config.get("layer_rope_theta")
    layers = hf_config["num_hidden_layers"]
    if bases is None:
        return {**settings, **windows}
    if len(bases) != layers:
        refuse("layer_rope_theta", bases, f"it must have num_hidden_layers={layers} numbers")
    pattern = windows.get("window_attn_skip_freq") or (int("window_size" in windows),) * layers
    of_windows, of_others = (
        {base for base, has_window in zip(bases, pattern, strict=True) if base and has_window == n} for n in (1, 0)
    )
    if max(len(of_windows), len(of_others)) > 1:
        refuse("layer_rope_theta", bases, "one base for layers with a window and one for the others is supported")
    base = min(of_others | (set() if of_others else of_windows), default=settings["rotary_base"])
    if (other := min(of_windows, default=base)) != base:
        if settings.get("use_rope_scaling"):
            refuse("layer_rope_theta", bases, "with scaled positions one base for all layers is supported")
        settings["rotary_base_of_windows"] = float(other)
    without = tuple(int(not theta) for theta in bases)
    return {**settings, **windows, "rotary_base": float(base), "no_rope_freq": without if any(without) else None}


def _positions_json(config: ModelConfig) -> Settings:
    layers = range(config.num_layers)
    base = config.rotary_base
    base_of_windows = base if config.rotary_base_of_windows is None else config.rotary_base_of_windows
    bases = [base_of_windows if config.window_of_layer(n) is not None else base for n in layers]
    kinds = ["full_attention" if config.window_of_layer(n) is None else "sliding_attention" for n in layers]
    return {
        **ROPE.write(config),
        **WINDOWS_OF_THREE_IN_FOUR.write(config),
        "layer_rope_theta": [float(config.has_rotary(n)) * bases[n] for n in layers],
        "layer_types": kinds,
    }


POSITIONS = KeyRule(
    _positions, _positions_json, {**ROPE.types, **WINDOWS_OF_THREE_IN_FOUR.types, "layer_rope_theta": BASES}
)
