"""Checkpoints of other programs, both ways: Hugging Face and PEFT, Megatron-LM, DeepSpeed."""

from megatron_core.config.checkpoint import FormatRow
from megatron_core.feature import Feature
from megatron_core.hub.rules import format_problems
from megatron_core.hub.settings import TokenIdConfig

FEATURES = (
    Feature(
        name="hub",
        settings=TokenIdConfig,
        is_used=lambda config: config.checkpoint.ckpt_format != "native",
        problems=format_problems,
        checkpoint_formats=(
            FormatRow(hook="megatron_core.hub.deepspeed.format:DeepSpeedFormat"),
            FormatRow(hook="megatron_core.hub.hugging_face.format:HuggingFaceFormat", setting="load_hf"),
            FormatRow(hook="megatron_core.hub.hugging_face.format:PeftFormat", setting="lora_load"),
            FormatRow(hook="megatron_core.hub.megatron_lm.format:MegatronFormat", writes=("torch_dist", "torch_dcp")),
        ),
    ),
)
