"""Torch's norms, built from a configuration."""

from typing import Any

from torch import nn


class WrappedTorchNorm:
    """LayerNorm or RMSNorm of torch, as selected by ``config.normalization``.

    In a layer's specification it selects the engine's norm.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> nn.Module:  # type: ignore[misc]
        """Return the module in ``config.params_dtype``; other arguments have no effect."""
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        return kind(hidden_size, eps=eps, dtype=config.params_dtype)


class L2Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps), without weights."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, **others: Any) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size, eps=eps, elementwise_affine=False)

    def forward(self, x: Any) -> Any:
        """``[..., h]`` -> the same shape."""
        return self.norm(x)
