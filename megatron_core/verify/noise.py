"""Measure the effect of rounding on a training: repeat it in one process with its sums in different orders."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_core.verify.bounds import Errors, relative_errors
from megatron_core.verify.ranks import run_ranks
from megatron_core.verify.trace import RankTrace, Trace, assemble

REORDERED_RUNS = 4
"""In a single run some elements are almost exact by chance, and AdamW magnifies the differences; in five hardly any."""
_FIRST_FACTOR = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
"""Index of the first of the two factors in the arguments of each matrix product."""


class ReorderedSums(TorchDispatchMode):
    """Inside this mode matrix products and sums over a dim add their terms in random order and in two rounded parts.

    A layout has the same effect: parts of a product are on several ranks, and the order of tokens differs. The result
    is as accurate as without the mode; the difference between both is the effect of rounding.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name in _FIRST_FACTOR and not kwargs:
            position = _FIRST_FACTOR[name]
            left, right = args[position : position + 2]
            one, other = self._halves(left, -1)
            total = func(*args[:position], left.index_select(-1, one), right.index_select(-2, one))
            return total.add_(left.index_select(-1, other).matmul(right.index_select(-2, other)))
        if func == torch.ops.aten.sum.dim_IntList and len(args[1]) == 1 and args[0].is_floating_point():
            x, dims, *options = args
            halves = self._halves(x, *dims)
            one, other = (func(x.index_select(dims[0], half), dims, *options, **kwargs) for half in halves)
            return one.add_(other)
        return func(*args, **kwargs)

    def _halves(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Random permutation of the indices along ``dim``, in two halves."""
        return torch.randperm(x.shape[dim], generator=self._generator).to(x.device).tensor_split(2)


def rounding_noise(
    experiment: Callable[..., RankTrace], *args: Any, baseline: Trace, device: str = "cpu", timeout: float = 300.0
) -> tuple[Errors, Errors]:
    """Return the errors of ``experiment(*args)`` in one process, and their maximum over it and ``REORDERED_RUNS`` runs.

    The additional runs are reordered. ``args`` select the dtype to compare with ``baseline``.
    """
    plain = run_ranks(1, experiment, *args, device=device, timeout=timeout)
    reordered = (
        run_ranks(1, _reordered, seed, experiment, *args, device=device, timeout=timeout)
        for seed in range(REORDERED_RUNS)
    )
    errors, *more = (relative_errors(assemble(traces), baseline) for traces in (plain, *reordered))
    return errors, {name: max(error, *(run[name] for run in more)) for name, error in errors.items()}


def _reordered(seed: int, experiment: Callable[..., RankTrace], *args: Any) -> RankTrace:
    with ReorderedSums(seed):
        return experiment(*args)
