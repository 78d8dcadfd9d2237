"""Softmax of attention scores: causal, with a mask, with a sliding window; native kernels as torch operators."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference
from megatron_core.ops.backend import Backend, select_backend
from megatron_core.ops.operator import operator
from megatron_core.ops.rows import contiguous_last_dim, new_like


def attention_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    window: int | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """p = exp(scale * scores) / sum of the same over the visible keys of a query; 0 for the other keys.

    ``scores`` ``[queries, keys]``, with up to two dims before these. ``mask`` is bool, True for a masked key. With
    ``causal`` keys after the query's own key are hidden; the own key of the last query is the last key. With ``window``
    w a query sees w keys, its own and the preceding ones. A row without visible keys is all zero.
    Source: Vaswani et al. 2017, section 3.2; Beltagy et al. 2020, section 3.1, for the window.
    """
    # The kernels do not read hidden keys, half of the scores of a causal layer; a mask of them would have to be built
    # and read.
    chosen = select_backend("softmax", backend, scores.device.type, scores.dtype)
    if chosen != "native":
        _check(scores, mask, window)
        return reference.attention_softmax(scores, mask, scale, causal, window)
    return _attention_softmax(scores, mask, scale, causal, window)


@operator("attention_softmax")
def _attention_softmax(scores: Tensor, mask: Tensor | None, scale: float, causal: bool, window: int | None) -> Tensor:
    _check(scores, mask, window)
    if mask is not None:
        # Expanded dims have stride 0, so that a mask for all heads is never copied.
        mask = contiguous_last_dim(mask.expand(*mask.shape[:-1], scores.shape[-1])).expand(scores.shape)
    scores = contiguous_last_dim(scores)
    probs = new_like(scores)
    native.call(
        "attention_softmax",
        scores,
        *(*_four(scores.shape, 1), scores, *_strides(scores), mask, *_strides(mask)),
        *(float(scale), _visible_keys(scores, causal, window), probs),
    )
    return probs


@operator("attention_softmax_backward")
def _attention_softmax_backward(
    dprobs: Tensor, probs: Tensor, scale: float, causal: bool, window: int | None
) -> Tensor:
    dprobs = contiguous_last_dim(dprobs)
    probs = probs.contiguous()
    dscores = new_like(probs)
    shape = _four(probs.shape, 1)
    seen = _visible_keys(probs, causal, window)
    native.call(
        "attention_softmax_backward", probs, *shape, dprobs, *_strides(dprobs), probs, float(scale), seen, dscores
    )
    return dscores


def _check(scores: Tensor, mask: Tensor | None, window: int | None) -> None:
    shape = list(scores.shape)
    if not 2 <= scores.dim() <= 4 or not scores.is_floating_point():
        raise ConfigError(
            f"attention_softmax: scores are {shape} of {scores.dtype}; they must be [queries, keys], with up to two "
            "dims before these, of a floating-point type"
        )
    if window is not None and window < 1:
        raise ConfigError(f"attention_softmax: window={window}; a query sees at least its own key: 1, 2, 3, ...")
    if mask is None:
        return
    if (mask.dtype, mask.device) != (torch.bool, scores.device):
        raise ConfigError(
            f"attention_softmax: mask is {mask.dtype} on {mask.device}; it must be torch.bool on {scores.device}, "
            "where the scores are, and True where a key is masked"
        )
    extents = shape[scores.dim() - mask.dim() :]
    if not 1 <= mask.dim() <= scores.dim() or any(m not in (1, n) for m, n in zip(mask.shape, extents, strict=True)):
        raise ConfigError(f"attention_softmax: mask is {list(mask.shape)}; it must broadcast to the scores' {shape}")


def _visible_keys(scores: Tensor, causal: bool, window: int | None) -> int:
    """The window of csrc/common/softmax.h: a causal query sees all keys up to its own."""
    every_key = scores.shape[-1] if causal else 0
    return every_key if window is None else window


def _four(sizes: Sequence[int], missing: int) -> tuple[int, ...]:
    return (missing,) * (4 - len(sizes)) + tuple(sizes)


def _strides(x: Tensor | None) -> tuple[int, ...]:
    """Strides of batch, head and query; 0 for missing dims and for dims of size 1, whose stride is arbitrary."""
    if x is None:
        return 0, 0, 0
    return _four([0 if n == 1 else by for n, by in zip(x.shape, x.stride(), strict=True)], 0)[:3]


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, _, *ctx.settings = inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, dprobs: Tensor) -> tuple[Tensor | None, ...]:
    dscores = _attention_softmax_backward(dprobs, *ctx.saved_tensors, *ctx.settings)
    return dscores, None, None, None, None


_attention_softmax.register_fake(lambda scores, *_: new_like(scores))
_attention_softmax_backward.register_fake(lambda dprobs, probs, *_: new_like(probs))
_attention_softmax.register_autograd(_backward, _save)
_attention_softmax_backward.register_no_autograd()
