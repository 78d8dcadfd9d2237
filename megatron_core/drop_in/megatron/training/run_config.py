"""The engine's configuration from a program's arguments."""

from argparse import Namespace
from typing import Any

import torch

from megatron.core.enums import AttnBackend
from megatron_core.config import RunConfig
from megatron_core.config.cli import missing_modes, refinements
from megatron_core.config.run import field_types
from megatron_core.text_file import read_table

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
TYPES_OF_TENSORS = (
    *("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "logit_dtype"),
    *("mamba_inference_conv_states_dtype", "mamba_inference_ssm_states_dtype", "mamba_training_ssm_states_dtype"),
)
"""Attributes that are words of ``DTYPES`` on the command line, and torch's types after ``validate_args``."""
LAYER_PATTERNS = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq")
"""Attributes that are a number n for every n-th layer, or a list with an entry for each layer."""
_TABLES = read_table(__file__)
OTHER_DEFAULTS: dict[str, Any] = _TABLES["other_defaults"]
"""Settings whose defaults here differ from Megatron-LM's: a program has Megatron-LM's."""
SHOWN_DEFAULTS: dict[str, Any] = _TABLES["shown_defaults"]
"""Megatron-LM's notation of settings that are not given; the engine's default is used."""


def run_config_of(args: Namespace) -> RunConfig:
    """Return the engine's configuration from the attributes with names of its settings."""
    settings = {name: getattr(args, name) for name in field_types() if hasattr(args, name)}
    names = {dtype: name for name, dtype in DTYPES.items()}
    settings |= {name: names.get(settings[name], settings[name]) for name in TYPES_OF_TENSORS if name in settings}
    if settings.get("weight_decay_incr_style") == "constant":  # ``validate_args`` has set both to the decay
        decays = ("start_weight_decay", "end_weight_decay")
        settings |= {name: None for name in decays if settings.get(name) == settings.get("weight_decay")}
    for name in LAYER_PATTERNS:
        if isinstance(value := settings.get(name), int):
            settings[name] = (value,)
    if isinstance(backend := settings.get("attention_backend"), AttnBackend):
        settings["attention_backend"] = "unfused" if backend in (AttnBackend.unfused, AttnBackend.local) else "auto"
    own = RunConfig().flat()
    for name, default in (OTHER_DEFAULTS | SHOWN_DEFAULTS).items():
        is_unused = name in SHOWN_DEFAULTS or (name.startswith("moe_") and settings.get("num_experts") is None)
        # One group of queries is a choice with --group-query-attention, and the default without.
        is_unused &= name != "num_query_groups" or not getattr(args, "group_query_attention", False)
        if is_unused and settings.get(name, own[name]) == default:
            settings[name] = own[name]
    config = RunConfig.from_flat(settings)
    # Refinements of a mode that is off have no effect in Megatron-LM; slime changes defaults of some.
    unread = missing_modes(config, sorted(refinements()))
    return RunConfig.from_flat(settings | {name: own[name] for name in unread}) if unread else config
