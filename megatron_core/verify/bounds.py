"""Error bounds that separate rounding noise from failures, relative to a baseline.

The baseline is one process in float64. A layout in float64 must agree with it to ``FLOAT64_BOUND``. In a narrower dtype
the size of rounding errors depends on the tensor, so that no single bound separates noise from failures. The bound is
therefore measured: one process in the same dtype runs several times with its sums in different orders
(``verify.noise``), and the largest error of each tensor is its noise. A layout, which is another order of the same
sums, may have at most ``NOISE_FACTOR`` times this error.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from megatron_core.verify.trace import Trace

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
