"""Tokens of prompts, text of tokens, and the random numbers of sampling."""

from typing import Any

import torch
from torch import Tensor

from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.utils import accepts_parameter
from megatron_core.inference.sampling import sample_tokens


class TextGenerationController:
    """A model with its tokenizer, for an engine.

    ``sampling_rng`` gives each request its seed; it must be in the same state on the ranks of a model.
    """

    def __init__(
        self, inference_wrapped_model: AbstractModelInferenceWrapper, tokenizer: Any, pg_collection: Any = None
    ) -> None:
        self.inference_wrapped_model, self.tokenizer = inference_wrapped_model, tokenizer
        self.model_config = inference_wrapped_model.config
        self.sampling_rng = torch.Generator().manual_seed(getattr(self.model_config, "inference_sampling_seed", 42))

    @staticmethod
    def tokenize_prompt(tokenizer: Any, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the tokens of ``prompt``, with ``tokenizer.bos`` in front exactly if ``add_BOS``."""
        tokens, bos = list(tokenizer.tokenize(prompt)), getattr(tokenizer, "bos", None)
        assert bos is not None or not add_BOS, "add_BOS=True, but the tokenizer has no bos"
        first = next((index for index, token in enumerate(tokens) if token != bos), len(tokens))
        return [bos] * add_BOS + tokens[first:]

    @staticmethod
    def detokenize(tokenizer: Any, tokens: list[int], remove_EOD: bool = True, skip_special_tokens: bool = True) -> str:
        """Return the text of ``tokens``, without ``tokenizer.eod`` at the end if ``remove_EOD``."""
        eod = getattr(tokenizer, "eod", None)
        while remove_EOD and eod is not None and tokens and tokens[-1] == eod:
            tokens = tokens[:-1]
        skips = accepts_parameter(tokenizer.detokenize, "skip_special_tokens")
        return tokenizer.detokenize(tokens, **({"skip_special_tokens": skip_special_tokens} if skips else {}))

    def sample_from_logits(
        self,
        last_token_logits: Tensor,
        sampling_params: SamplingParams | None = None,
        vocab_size: int | None = None,
        **deprecated: Any,
    ) -> Tensor:
        """Return a token below ``vocab_size`` for each row of ``last_token_logits`` ``[b, v]``."""
        settings = sampling_params or deprecated.get("common_inference_params") or SamplingParams()
        logits = last_token_logits[:, :vocab_size]
        rows = [self.next_seed() for _ in range(len(logits))]
        generators = [torch.Generator().manual_seed(seed) for seed in rows]
        return torch.tensor(sample_tokens(logits, [settings.for_engine(seed) for seed in rows], generators))

    def next_seed(self) -> int:
        """Draw the seed of a request."""
        return int(torch.randint(2**62, (1,), generator=self.sampling_rng))
