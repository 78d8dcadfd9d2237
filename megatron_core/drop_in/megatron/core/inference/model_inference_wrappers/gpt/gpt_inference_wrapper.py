"""A GPT with its context of generation."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)


class GPTInferenceWrapper(AbstractModelInferenceWrapper):
    """A GPT with its context of generation."""

    def prep_inference_input(self, prompts_tokens: Tensor) -> dict[str, Any]:
        """Return the inputs of whole prompts ``[b, s]``. Attention is causal; the mask is None."""
        positions = torch.arange(prompts_tokens.shape[1], device=prompts_tokens.device)
        return {
            "tokens": prompts_tokens,
            "attention_mask": None,
            "position_ids": positions[None].expand_as(prompts_tokens),
        }

    def get_batch_for_context_window(
        self, inference_input: dict[str, Any], context_start_position: int, context_end_position: int
    ) -> dict[str, Any]:
        """Return the inputs of the positions from ``context_start_position`` to before ``context_end_position``."""
        window = slice(context_start_position, context_end_position)
        return {
            "tokens": inference_input["tokens"][:, window],
            "position_ids": inference_input["position_ids"][:, window],
            "attention_mask": None,
        }
