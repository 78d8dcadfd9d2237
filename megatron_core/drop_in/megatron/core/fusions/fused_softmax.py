"""Softmax of scaled and masked attention scores."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.core.transformer.enums import AttnMaskType
from megatron_core.errors import ConfigError


class SoftmaxOne(nn.Module):
    """exp(x_i) / (exp(offset) + sum_j exp(x_j)): a softmax whose weights may sum to less than 1 (Miller 2023)."""

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0) -> None:
        super().__init__()
        self.dim, self.denominator_offset = dim, denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """``[b, heads, s, t]``; ``denominator_offset`` is a number for all heads, or logits ``[heads]``."""
        offset = torch.as_tensor(self.denominator_offset, dtype=x.dtype, device=x.device).reshape(1, -1, 1, 1)
        sink = offset.expand(x.shape[0], x.shape[1], x.shape[2], 1)
        return torch.softmax(torch.cat([x, sink], dim=-1), dim=-1)[..., :-1]


class FusedScaleMaskSoftmax(nn.Module):
    """softmax(scale x, masked) of scores ``[b, heads, s, t]``, in plain torch.

    ``mask_func(scores, mask)`` masks the scores. Without a mask a causal type creates one, over the last
    ``window_size[0]`` keys if a window is given.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise ConfigError("input_in_fp16 and input_in_bf16 cannot both be True")
        if scale is not None and not softmax_in_fp32:
            raise ConfigError(f"scale={scale} needs softmax_in_fp32=True")
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type, self.mask_func, self.scale = attn_mask_type, mask_func, scale
        self.softmax_in_fp32, self.window_size = softmax_in_fp32, window_size

    def forward(self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None) -> Tensor:
        """Scores ``[b, heads, s, t]`` -> weights of the same shape and dtype."""
        if input.dim() != 4:
            raise ConfigError(f"scores of shape {tuple(input.shape)} are not [b, heads, s, t]")
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        scores = scores if self.scale is None else scores * self.scale
        mask = self._causal(input) if mask is None else mask
        scores = scores if mask is None else self.mask_func(scores, mask)
        weights = torch.softmax(scores, dim=-1) if softmax_offset is None else SoftmaxOne(-1, softmax_offset)(scores)
        return weights.to(input.dtype) if self.input_in_float16 else weights

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Return False: this is plain torch."""
        return False

    def _causal(self, scores: Tensor) -> Tensor | None:
        if self.attn_mask_type != AttnMaskType.causal or scores.shape[2] == 1:
            return None
        queries, keys = scores.shape[2:]
        if queries != keys:
            raise ConfigError(f"a causal softmax of {queries} queries and {keys} keys needs a mask; pass it")
        seen = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril()
        left = -1 if self.window_size is None else self.window_size[0]
        return ~(seen if left < 0 else seen.triu(-left))
