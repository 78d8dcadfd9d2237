"""Error bounds that separate rounding noise from failures, relative to a baseline.

The baseline is one process in float64. A layout in float64 must agree with it to ``FLOAT64_BOUND``. In a narrower dtype
the size of rounding errors depends on the tensor, so that no single bound separates noise from failures. The bound is
therefore measured: one process in the same dtype runs several times with its sums in different orders
(``rounding_noise``), and the largest error of each tensor is its noise. A layout, which is another order of the same
sums, may have at most ``NOISE_FACTOR`` times this error.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_core.verify.ranks import run_ranks
from megatron_core.verify.trace import RankTrace, Trace, assemble

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Machine epsilon of each dtype: the distance from 1 to the next number."""
FLOAT64_BOUND = 1e-9
NOISE_FACTOR = 5.0
"""Correct layouts had errors of up to 2.7 times the noise, in float32 and in bfloat16."""
NEGLIGIBLE = 1e-6
"""Share of the largest element of all gradients of a step, or weights, that is the least scale of errors. Some
gradients are sums that are exactly 0, such as those of biases of keys without rotary positions: they consist of
rounding errors, of about 1e-17 of the largest gradient in float64."""

Errors = Mapping[str, float]
"""Relative errors by quantity: ``loss0``, ``norm0``, ``grad0.NAME``, ..., ``weight.NAME``."""


def relative_errors(trace: Trace, baseline: Trace) -> dict[str, float]:
    """Largest deviation of each quantity, relative to its largest element in ``baseline``; inf if it is missing.

    Deviations of a tensor whose elements are below ``NEGLIGIBLE`` of the largest gradient of the step, or weight, are
    relative to this share of it.
    """
    result = {f"loss{i}": _relative(a, b) for i, (a, b) in enumerate(zip(trace.losses, baseline.losses, strict=True))}
    result |= {f"norm{i}": _relative(a, b) for i, (a, b) in enumerate(zip(trace.norms, baseline.norms, strict=True))}
    largest: dict[str, float] = {}
    for name, expected in baseline.tensors.items():
        quantity = name.partition(".")[0]
        largest[quantity] = max(largest.get(quantity, 0.0), float(np.max(np.abs(expected), initial=0.0)))
    for name, expected in baseline.tensors.items():
        values = trace.tensors.get(name)
        fits = values is not None and values.shape == expected.shape
        result[name] = (
            np.inf
            if values is None or not fits
            else _relative(values, expected, NEGLIGIBLE * largest[name.partition(".")[0]])
        )
    return result | {name: np.inf for name in trace.tensors if name not in baseline.tensors}


def _relative(actual: np.ndarray | float, expected: np.ndarray | float, least: float = 0.0) -> float:
    """``least``: the smallest magnitude to which the difference is compared."""
    difference = float(np.max(np.abs(np.subtract(actual, expected)), initial=0.0))
    scale = float(np.max(np.abs(expected), initial=0.0))
    error = difference / max(scale, least) if scale else difference
    return error if np.isfinite(error) else np.inf


class Bounds:
    """Upper bound of each quantity's error; ``noise`` are the errors of one process in ``dtype``, None in float64.

    Each tensor has its own bound, because the rounding errors of weights after AdamW's division differ by more than a
    factor of ten. The noise is at least half an epsilon, the rounding error of storing a tensor.
    """

    def __init__(self, dtype: str, noise: Errors | None = None) -> None:
        self._noise = noise
        self._floor = EPSILON[dtype] / 2

    def of(self, name: str) -> float:
        """The largest permitted error of ``name``."""
        if self._noise is None:
            return FLOAT64_BOUND
        return NOISE_FACTOR * max(self._noise.get(name, 0.0), self._floor)


def beyond(errors: Errors, bounds: Bounds) -> Iterator[str]:
    """Yield a sentence for each quantity beyond its bound: earliest step first, then largest excess.

    Errors of the earliest step are closest to the cause; later steps inherit them.
    """
    excess = {name: error / bounds.of(name) for name, error in errors.items() if not error <= bounds.of(name)}
    for name in sorted(excess, key=lambda name: (_step_of(name), -excess[name])):
        yield f"{name} is off by {errors[name]:.1e} (allowed: {bounds.of(name):.1e})"


def _step_of(name: str) -> float:
    """The step of a quantity; inf for weights, which are compared after the last step."""
    digits = re.search(r"\d+$", name.split(".")[0])
    return int(digits[0]) if digits else np.inf


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
