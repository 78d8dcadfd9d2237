"""Low-rank adapters of frozen linear layers (LoRA)."""

from megatron_core.feature import Feature
from megatron_core.features.lora.rules import has_adapters

LORA = Feature(name="lora", is_used=has_adapters, change_stage="megatron_core.features.lora.stage:add_to_stage")
