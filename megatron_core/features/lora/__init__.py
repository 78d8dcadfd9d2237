"""Low-rank adapters of frozen linear layers (LoRA)."""

from megatron_core.feature import Feature
from megatron_core.features.lora.rules import has_adapters, tuning_problems
from megatron_core.features.lora.settings import TuningConfig

LORA = Feature(
    name="lora",
    settings=TuningConfig,
    is_used=has_adapters,
    problems=tuning_problems,
    change_stage="megatron_core.features.lora.adapters:add_to_stage",
    added_weights="megatron_core.features.lora.weights:Adapters",
    added_tensors="megatron_core.features.lora.sizes:adapter_tensors",
)
