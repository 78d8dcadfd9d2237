"""Modules without effect, for unused places of a specification."""

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """x -> x; other arguments have no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return x


class IdentityFuncOp(IdentityOp):
    """() -> IdentityOp's forward, for places that need a function that returns a function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a function that returns its first argument."""
        return super().forward
