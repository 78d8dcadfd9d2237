"""Fused functions of Megatron Core: activations, dropout, softmax and loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from megatron.core.enums import AttnMaskType
from megatron_core.errors import ConfigError
from megatron_core.ops import bias_activation
from megatron_core.ops.reference import quick_gelu as quick_gelu
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def swiglu(y: Tensor) -> Tensor:
    """``[..., 2 m]``, gate and value -> silu(gate) * value ``[..., m]``."""
    return bias_activation(y, None, "swiglu")


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """``swiglu(y + bias)``."""
    return bias_activation(y, bias, "swiglu")


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """``swiglu(input + bias)``, which saves only ``input`` for backward; ConfigError for the two switches.

    With ``clamp_value`` c: silu(min(gate, c)) * max(-c, min(value, c)), at least in float32.
    """
    if fp8_input_store or cpu_offload_input:
        raise ConfigError("fp8_input_store and cpu_offload_input are not supported; remove them")
    if clamp_value is None:
        return bias_activation(input, bias, "swiglu")
    if not clamp_value > 0:
        raise ConfigError(f"clamp_value={clamp_value} must be > 0, or None for no limit")
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    gate, value = (wide if bias is None else wide + bias).chunk(2, -1)
    return (silu(gate.clamp(max=clamp_value)) * value.clamp(-clamp_value, clamp_value)).to(input.dtype)


def weighted_bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    weights: Tensor,
    fp8_input_store: bool = False,
    clamp_value: float | None = None,
) -> Tensor:
    """``bias_swiglu_impl(input)`` times a weight for each token, ``[tokens, 1]``, in the dtype of ``input``.

    Raises ConfigError with a bias, as Megatron Core does.
    """
    if bias is not None:
        raise ConfigError("weighted_bias_swiglu_impl takes no bias; pass None")
    return (bias_swiglu_impl(input, None, fp8_input_store, clamp_value=clamp_value) * weights).to(input.dtype)


def weighted_squared_relu_impl(input: Tensor, weights: Tensor) -> Tensor:
    """relu(input)^2 times a weight for each token, ``[tokens, 1]``, in the dtype of ``input``."""
    return (nn.functional.relu(input).square() * weights).to(input.dtype)


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """``bias_gelu_impl`` with the bias first."""
    return bias_gelu_impl(y, bias)


def bias_gelu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(input + bias) in the tanh approximation, as in Megatron's fused function."""
    return bias_activation(input, bias, "gelu_tanh")


def geglu(y: Tensor) -> Tensor:
    """``[..., 2 m]``, gate and value -> gelu(gate) * value ``[..., m]``, in the tanh approximation."""
    return bias_activation(y, None, "geglu_tanh")


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """``geglu(input + bias)``."""
    return bias_activation(input, bias, "geglu_tanh")


BiasDropoutAdd = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


def _bias_dropout_add_func(
    x_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float, training: bool
) -> Tensor:
    """residual + dropout(x + bias), in the wider of both dtypes; in place without training and gradients.

    torch's generator draws the mask, as in Megatron; the engine's layers use ``KeyedDropout``.
    """
    x, bias = x_with_bias
    dtype = torch.promote_types(x.dtype, residual.dtype)
    x, residual = x.to(dtype), residual.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    tracked = torch.is_grad_enabled() and (x.requires_grad or residual.requires_grad)
    if not training and not tracked:
        return (x if bias is None else x.add_(bias)).add_(residual)
    return residual + nn.functional.dropout(x if bias is None else x + bias, p=prob, training=training)


def get_bias_dropout_add(training: bool, fused: bool) -> BiasDropoutAdd:
    """Return ``f(x_with_bias, residual, prob)``; ``fused`` has no effect."""
    return lambda x_with_bias, residual, prob: _bias_dropout_add_func(x_with_bias, residual, prob, training)


def bias_dropout_add_unfused(training: bool) -> BiasDropoutAdd:
    """Return ``get_bias_dropout_add(training, False)``."""
    return get_bias_dropout_add(training, fused=False)


bias_dropout_add_fused_train = get_bias_dropout_add(training=True, fused=True)
bias_dropout_add_fused_inference = get_bias_dropout_add(training=False, fused=True)


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


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Group | None = None
) -> Tensor:
    """Return losses ``[s, b]`` of this rank's logits ``[s, b, v/tp]``."""
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)
