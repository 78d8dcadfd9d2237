"""Norms over the last dimension, with variances divided by the number of channels."""

from __future__ import annotations

from types import SimpleNamespace

from torch import Tensor

Weights = dict[str, Tensor]
"""Weights by the names that follow a prefix."""


def under(weights: Weights, prefix: str) -> Weights:
    """The weights of a module: those whose names begin with ``prefix`` and a dot, without them."""
    return {name[len(prefix) + 1 :]: value for name, value in weights.items() if name.startswith(prefix + ".")}


def rms(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) (Zhang and Sennrich 2019, equation 4)."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def standardized(x: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) (Ba et al. 2016, equation 3)."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def norm(s: SimpleNamespace, x: Tensor, weights: Weights, eps: float | None = None) -> Tensor:
    """The norm of hidden states, of heads or of latents, with its weight and, for LayerNorm, its bias.

    With ``apply_layernorm_1p`` the factor is 1 + weight; weights and biases may be left out by settings.
    """
    eps = s.norm_epsilon if eps is None else eps
    if s.normalization == "RMSNorm":
        return rms(x, eps) * factor_of(s, weights["weight"])
    normed = standardized(x, eps) * factor_of(s, weights["weight"])
    return normed if s.disable_bias_layernorm else normed + weights["bias"]


def factor_of(s: SimpleNamespace, weight: Tensor) -> Tensor:
    """The factor that a stored weight of a norm stands for."""
    return 1 + weight if s.apply_layernorm_1p else weight


def hidden_norm(s: SimpleNamespace, x: Tensor, weights: Weights) -> Tensor:
    """The norm of hidden states, which has no weights with ``disable_weight_layernorm``."""
    return rms(x, s.norm_epsilon) if s.disable_weight_layernorm else norm(s, x, weights)


def head_norm(s: SimpleNamespace, x: Tensor, weights: Weights) -> Tensor:
    """The norm of queries or keys ``[b, t, heads, d]``: of each head with common or own weights, or of all heads."""
    if s.qk_layernorm_over_heads:  # OLMo 2 (arXiv 2501.00656), section 3.1
        return (rms(x.flatten(2), s.norm_epsilon) * weights["weight"]).view_as(x)
    if s.qk_layernorm_weight_per_head:
        normed = (rms if s.normalization == "RMSNorm" else standardized)(x, s.norm_epsilon)
        return normed * factor_of(s, weights["weight"]).view(x.shape[2:])
    return norm(s, x, weights)
