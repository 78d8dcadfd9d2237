"""What rounding does to a training: the same one in one process, with its sums in other orders."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_core.verify.compare import Errors, relative_errors
from megatron_core.verify.ranks import run_ranks
from megatron_core.verify.trace import RankTrace, Trace, assemble

REORDERED_RUNS = 4
"""One run gets some element all but exactly by chance, and AdamW magnifies such differences; five hardly do."""
_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
"""Where the first of the two factors is among the arguments of each matrix product."""


class ReorderedSums(TorchDispatchMode):
    """Inside, matrix products and sums over a dim add their terms in random order and in two parts, each rounded.

    That is what a layout does to them: parts of a product lie on several ranks, and tokens come in another order. The
    result is as exact as the plain one; how far the two are apart is what rounding may do.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in _FIRST_FACTOR and not kwargs:
            at = _FIRST_FACTOR[name]
            left, right = args[at : at + 2]
            one, other = self._halves(left, -1)
            total = func(*args[:at], left.index_select(-1, one), right.index_select(-2, one))
            return total.add_(left.index_select(-1, other).matmul(right.index_select(-2, other)))
        if func == torch.ops.aten.sum.dim_IntList and len(args[1]) == 1 and args[0].is_floating_point():
            x, dims, *rest = args
            one, other = (func(x.index_select(dims[0], half), dims, *rest, **kwargs) for half in self._halves(x, *dims))
            return one.add_(other)
        return func(*args, **kwargs)

    def _halves(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Indices along ``dim`` in random order, in two halves."""
        return torch.randperm(x.shape[dim], generator=self._generator).to(x.device).tensor_split(2)


def rounding_noise(
    experiment: Callable[..., RankTrace], *args: Any, baseline: Trace, device: str = "cpu", timeout: float = 300.0
) -> tuple[Errors, Errors]:
    """Errors of ``experiment(*args)`` in one process, and the largest of these and ``REORDERED_RUNS`` reordered ones.

    ``args`` ask for the dtype that is compared with ``baseline``.
    """
    plain = run_ranks(1, experiment, *args, device=device, timeout=timeout)
    others = (
        run_ranks(1, _reordered, seed, experiment, *args, device=device, timeout=timeout)
        for seed in range(REORDERED_RUNS)
    )
    errors, *more = (relative_errors(assemble(traces), baseline) for traces in (plain, *others))
    return errors, {name: max(error, *(run[name] for run in more)) for name, error in errors.items()}


def _reordered(seed: int, experiment: Callable[..., RankTrace], *args: Any) -> RankTrace:
    with ReorderedSums(seed):
        return experiment(*args)
