"""For Megatron Core's users: masks of attention and forms of GELU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Scores of -10,000 where the mask is True, in place."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def get_default_causal_mask(sq: int) -> Tensor:
    """``[sq, sq]``, True where a key comes after the query; on the current GPU, if there is one."""
    return torch.ones(sq, sq, dtype=torch.bool, device=_device()).triu(1)


def get_sliding_window_causal_mask(sq: int, skv: int, window_size: tuple[int, int]) -> Tensor:
    """``[sq, skv]``, False for the keys from ``window_size[0]`` before a query's own to ``window_size[1]`` after it.

    The last query's own key is the last one.
    """
    own, (left, right) = skv - sq, window_size
    seen = torch.ones(sq, skv, dtype=torch.bool, device=_device())
    return ~seen.triu(own - left).tril(own + right)


def openai_gelu(x: Tensor) -> Tensor:
    """GELU in the tanh approximation, as an ``activation_func``."""
    return nn.functional.gelu(x, approximate="tanh")


def erf_gelu(x: Tensor) -> Tensor:
    """The exact GELU."""
    return nn.functional.gelu(x)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
