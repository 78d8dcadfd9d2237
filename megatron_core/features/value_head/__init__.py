"""Value models: the last stage has a head of one output instead of the vocabulary."""

from megatron_core.feature import Feature
from megatron_core.features.value_head.settings import HEAD, ValueHeadConfig, has_value_head, value_head_problems

VALUE_HEAD = Feature(
    name="value_head",
    settings=ValueHeadConfig,
    is_used=has_value_head,
    problems=value_head_problems,
    layers={HEAD: "megatron_core.features.value_head.head:ValueHead"},
    change_stage="megatron_core.features.value_head.head:train_head",
    added_weights="megatron_core.features.value_head.head:NewValueHead",
)
