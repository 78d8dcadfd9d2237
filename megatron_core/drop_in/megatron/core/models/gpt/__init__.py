"""GPT with Megatron Core's names."""

from megatron.core.models.gpt.gpt_model import GPTModel
