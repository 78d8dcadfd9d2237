"""Megatron-LM's models before ``megatron.core``, which are not supported, and their parts at former paths."""

from megatron.legacy.model.gpt_model import GPTModel
