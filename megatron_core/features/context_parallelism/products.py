"""Attention of one tile with the log-sum-exp of its scores, and its gradients given statistics of the whole softmax.

Part i of a query's keys gives o_i = softmax(s_i) V_i and l_i = log sum exp(s_i). With l = log sum exp(l_i) the whole
attention is sum exp(l_i - l) o_i, and the gradients of part i are those of attention with the weights exp(s_i - l).
Source: Dao et al. 2022, section 3.1; Liu et al. 2023 for parts on several ranks.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from megatron_core.features.context_parallelism.tiles import Tile
from megatron_core.ops.rows import wide

Gradients = tuple[Tensor, Tensor, Tensor]
Drop = Callable[[Tensor, Tile, int], Tensor]
"""(weights of a tile, the tile, the rank that owns the keys) -> the weights after dropout, scaled by 1 / (1 - p)."""
Mask = Callable[[Tile, int], Tensor]
"""(a tile, the rank that owns the keys) -> ``[b or 1, 1, q, k]``, True where a key is masked for a query."""


class Products(Protocol):
    """Attention of a tile: queries ``[b, heads, q, d]``, keys and values ``[b, groups, k, d]``.

    ``owner`` is the rank that owns the keys.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, owner: int) -> tuple[Tensor, Tensor]:
        """Output ``[b, heads, q, d]`` and log-sum-exp ``[b, heads, q]``, the latter in float32 or wider."""
        ...

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile, owner: int
    ) -> Gradients:
        """Gradients of query, key and value; ``out`` and ``lse`` are the results of the whole attention."""
        ...


class Unfused:
    """Attention in separate operations, in float32 or wider, with optional dropout ``drop`` and custom ``mask``.

    With ``softcap`` c scores s become c tanh(s / c), whose derivative is 1 - tanh(s / c)^2.
    """

    def __init__(self, drop: Drop | None = None, softcap: float | None = None, mask: Mask | None = None) -> None:
        self.drop = drop
        self.softcap = softcap
        self.mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, owner: int) -> tuple[Tensor, Tensor]:
        """As ``Products``."""
        scores = self._masked(self._scores(query, key), tile, owner)
        lse = scores.logsumexp(-1)
        # Weights of this tile's own softmax; ``merge_`` rescales them when all tiles are known.
        weights = self._kept((scores - finite(lse).unsqueeze(-1)).exp(), tile, owner)
        return (_by_group(weights, key) @ value.unsqueeze(2).to(weights.dtype)).flatten(1, 2), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile, owner: int
    ) -> Gradients:
        """As ``Products``."""
        grad, out, query, key, value = (x.to(lse.dtype) for x in (grad, out, query, key, value))
        scores = self._scores(query, key)
        # With the log-sum-exp of the whole attention these are the final weights, so no tile needs the others.
        weights = (self._masked(scores, tile, owner) - lse.unsqueeze(-1)).exp()
        grad_value = _over_group(self._kept(weights, tile, owner), grad, key)
        grad_weights = (_by_group(grad, key) @ value.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
        grad_weights = self._kept(grad_weights, tile, owner)
        # sum(grad * out) is the sum over all keys of p dp, on all ranks (Dao et al. 2022, section 3.1).
        grad_scores = weights * (grad_weights - (grad * out).sum(-1, keepdim=True)) / math.sqrt(query.shape[-1])
        if self.softcap is not None:
            grad_scores *= 1 - (scores / self.softcap).square()
        grad_query = (_by_group(grad_scores, key) @ key.unsqueeze(2)).flatten(1, 2)
        return grad_query, _over_group(grad_scores, query, key), grad_value

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        scores = (_by_group(query, key) @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
        scores = scores.to(wide(scores.dtype)) / math.sqrt(query.shape[-1])
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def _masked(self, scores: Tensor, tile: Tile, owner: int) -> Tensor:
        unseen = hidden(tile, owner, self.mask, scores.device)
        return scores if unseen is None else scores.masked_fill(unseen, -torch.inf)

    def _kept(self, weights: Tensor, tile: Tile, owner: int) -> Tensor:
        return weights if self.drop is None else self.drop(weights, tile, owner)


class FusedOnCPU:
    """torch's flash attention for CPUs, which supports float64 and masks, and from torch 2.9 on groups of heads; with
    2.8 keys and values are repeated. Values with fewer channels than keys are padded with zeros."""

    def __init__(self, mask: Mask | None = None) -> None:
        self.mask = mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, owner: int) -> tuple[Tensor, Tensor]:
        """As ``Products``."""
        mask = self._added(query, tile, owner)
        missing = query.shape[-1] - value.shape[-1]
        key = _repeated(query, key)
        filled = _repeated(query, _filled(value, missing))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, filled, 0.0, self._is_causal(tile), attn_mask=mask
        )
        if self.mask is not None and mask is not None:  # the operator's log-sum-exp of a row without keys is 0
            lse = lse.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
        return out[..., : value.shape[-1]], lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile, owner: int
    ) -> Gradients:
        """As ``Products``."""
        mask = self._added(query, tile, owner)
        missing = query.shape[-1] - value.shape[-1]
        grad, filled, out = (_filled(x, missing) for x in (grad, value, out))
        repeated = _repeated(query, key), _repeated(query, filled)
        grad_query, *grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, *repeated, out, lse, 0.0, self._is_causal(tile), attn_mask=mask
        )
        # Heads of a group share its key and value, whose gradient is the sum.
        grad_key, grad_value = (
            grad if grad.shape[1] == key.shape[1] else _by_group(grad, key).sum(2) for grad in grads
        )
        return grad_query, grad_key, grad_value[..., : value.shape[-1]]

    def _is_causal(self, tile: Tile) -> bool:
        return tile.is_causal_square and self.mask is None

    def _added(self, query: Tensor, tile: Tile, owner: int) -> Tensor | None:
        """The mask to add to the scores: 0 for a visible key, else -inf."""
        unseen = None if self._is_causal(tile) else hidden(tile, owner, self.mask, query.device)
        return None if unseen is None else torch.zeros_like(unseen, dtype=query.dtype).masked_fill_(unseen, -torch.inf)


class FusedOnCUDA:
    """torch's flash attention for GPUs, in 16 bits; unfused for unsupported tiles: windows, values with other channels
    than keys, and heads that ``scaled_dot_product_attention`` would pad or run with another kernel."""

    def __init__(self) -> None:
        self.unfused = Unfused()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tile: Tile, owner: int) -> tuple[Tensor, Tensor]:
        """As ``Products``."""
        if self._lacks(tile, query, value):
            return self.unfused.forward(query, key, value, tile, owner)
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, tile.is_causal_square, False)[
            :2
        ]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, tile: Tile, owner: int
    ) -> Gradients:
        """As ``Products``."""
        if self._lacks(tile, query, value):
            return self.unfused.backward(grad, query, key, value, out, lse, tile, owner)
        no_state = torch.empty(0, dtype=torch.uint64, device=query.device)  # no generator state: there is no dropout
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, value, out, lse.contiguous(), None, None, query.shape[2], key.shape[2]),
            *(0.0, tile.is_causal_square, no_state, no_state),
        )

    def _lacks(self, tile: Tile, query: Tensor, value: Tensor) -> bool:
        channels = query.shape[-1]
        fits = channels == value.shape[-1] and channels % 8 == 0 and channels <= 256
        return not fits or (tile.band is not None and not tile.is_causal_square)


def fused_products(device: torch.device, dtype: torch.dtype, mask: Mask | None = None) -> Products:
    """Return the fastest implementation for ``device`` and ``dtype`` that supports ``mask``."""
    if device.type == "cpu":
        return FusedOnCPU(mask)
    # Flash attention on GPUs has neither float32 nor masks.
    return FusedOnCUDA() if dtype in (torch.float16, torch.bfloat16) and mask is None else Unfused(mask=mask)


def visible_keys(tile: Tile, device: torch.device) -> Tensor:
    """``[q, k]``, True where a key is visible to a query, for a tile with a band."""
    assert tile.band is not None, "without a band all is visible"
    offset, window = tile.band
    shape = tile.queries[1] - tile.queries[0], tile.keys[1] - tile.keys[0]
    return torch.ones(shape, dtype=torch.bool, device=device).tril(offset).triu(offset - window + 1)


def hidden(tile: Tile, owner: int, mask: Mask | None, device: torch.device) -> Tensor | None:
    """True where the tile's band or ``mask`` hides a key from a query; None: all keys are visible."""
    masked = None if mask is None else mask(tile, owner)
    if tile.band is None:
        return masked
    unseen = ~visible_keys(tile, device)
    return unseen if masked is None else masked | unseen


def finite(lse: Tensor) -> Tensor:
    """The log-sum-exp to subtract from scores; 0 for rows without keys, whose scores are all -inf."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def merge_(out: Tensor, lse: Tensor, new: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over two sets of keys into ``out`` and ``lse``, in place; an empty set has ``lse`` -inf."""
    # Without an exponential of an unscaled score, which would overflow.
    total = torch.logaddexp(lse, part_lse)
    base = finite(total)
    out.mul_((lse - base).exp_().unsqueeze(-1)).addcmul_(new.to(out.dtype), (part_lse - base).exp_().unsqueeze(-1))
    lse.copy_(total)


def _filled(x: Tensor, channels: int) -> Tensor:
    return nn.functional.pad(x, (0, channels)) if channels else x


def _repeated(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values for each head, if torch's attention has no groups: version 2.8 reads beyond their memory."""
    return x if TorchVersion(torch.__version__) >= "2.9" else x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _by_group(x: Tensor, key: Tensor) -> Tensor:
    """``[b, heads, ...]`` -> ``[b, groups, heads of each, ...]``."""
    return x.unflatten(1, (key.shape[1], -1))


def _over_group(weights: Tensor, x: Tensor, key: Tensor) -> Tensor:
    """``weights``^T times ``x``, summed over the heads of each group: ``[b, groups, k, d]``."""
    return (_by_group(weights, key).transpose(-1, -2) @ _by_group(x, key).to(weights.dtype)).sum(2)
