"""Computation of a module in float64 throughout, also where its code asks for float32."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WithoutFloat32(TorchFunctionMode):
    """Replace float32 by float64 in calls of torch: ``x.float()``, ``x.to(torch.float32)``, ``dtype=torch.float32``.

    Norms and routers of transformers models compute in float32; the rounding would hide small errors of a layout.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with float64 in place of float32."""
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args, **named)
        if func is torch.Tensor.backward and named.get("gradient") is None and not named.get("inputs"):
            # torch suspends modes while it handles this call; activations that are recomputed in it need this one.
            with self:
                retain = bool(named.get("retain_graph"))
                create = bool(named.get("create_graph"))
                run_backward = torch.autograd.Variable._execution_engine.run_backward
                return run_backward(
                    args, (torch.ones_like(args[0]),), retain, create, (), allow_unreachable=True, accumulate_grad=True
                )
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
