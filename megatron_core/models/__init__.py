"""Models built from the parallel layers."""

from megatron_core.models.gpt.model import GPTModel
