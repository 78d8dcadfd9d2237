"""Modules that do nothing, for empty places of a specification."""

from typing import Any

import torch


class IdentityOp(torch.nn.Module):
    """x -> x, whatever else it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The first argument."""
        return x


class IdentityFuncOp(IdentityOp):
    """() -> IdentityOp's forward, for places that take a function that makes a function."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A function that returns its first argument."""
        return super().forward
