"""Float noise or a silent failure: how far a training may be from the baseline.

The baseline is one process in float64. In float64 itself every quantity has to agree with it to ``FLOAT64_BOUND``. In a
narrower dtype rounding moves everything, by an amount that depends on the tensor, so that no single number separates
noise from a failure. What does is one process in the same dtype, run several times with its sums in other orders
(``verify.noise``): the largest distance from the baseline is what rounding does to each tensor, and a layout, which is
another order of the same sums, may be at most ``NOISE_FACTOR`` times as far.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from megatron_core.verify.trace import Trace

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number of each dtype."""
FLOAT64_BOUND = 1e-9
NOISE_FACTOR = 5.0
"""Correct layouts were seen up to 2.7 times as far from the baseline as the noise, in float32 and in bfloat16."""

Errors = Mapping[str, float]
"""Relative errors by quantity: ``loss0``, ``norm0``, ``grad0.NAME``, ..., ``weight.NAME``."""


def relative_errors(found: Trace, baseline: Trace) -> dict[str, float]:
    """Largest deviation of each quantity, relative to its largest element in ``baseline``; inf where it is missing."""
    result = {f"loss{i}": _relative(a, b) for i, (a, b) in enumerate(zip(found.losses, baseline.losses, strict=True))}
    result |= {f"norm{i}": _relative(a, b) for i, (a, b) in enumerate(zip(found.norms, baseline.norms, strict=True))}
    for name, expected in baseline.tensors.items():
        values = found.tensors.get(name)
        fits = values is not None and values.shape == expected.shape
        result[name] = np.inf if values is None or not fits else _relative(values, expected)
    return result | {name: np.inf for name in found.tensors if name not in baseline.tensors}


def _relative(found: np.ndarray | float, expected: np.ndarray | float) -> float:
    difference = float(np.max(np.abs(np.subtract(found, expected)), initial=0.0))
    scale = float(np.max(np.abs(expected), initial=0.0))
    error = difference / scale if scale else difference
    return error if np.isfinite(error) else np.inf


class Bounds:
    """How large each quantity's error may be; ``noise`` are the errors of one process in ``dtype``, None in float64.

    Each tensor has its own bound: what rounding does to weights behind AdamW's division differs by tens of times. The
    least is what rounding does to a tensor that is only stored: half an epsilon.
    """

    def __init__(self, dtype: str, noise: Errors | None = None) -> None:
        self._noise, self._floor = noise, EPSILON[dtype] / 2

    def of(self, name: str) -> float:
        """The largest error that ``name`` may have."""
        if self._noise is None:
            return FLOAT64_BOUND
        return NOISE_FACTOR * max(self._noise.get(name, 0.0), self._floor)


def beyond(errors: Errors, bounds: Bounds) -> Iterator[str]:
    """A sentence for each quantity that is further off than it may be: the earliest step first, then the worst.

    What is wrong in the first step is nearest to the cause; all that comes later inherits it.
    """
    excess = {name: error / bounds.of(name) for name, error in errors.items() if not error <= bounds.of(name)}
    for name in sorted(excess, key=lambda name: (_step_of(name), -excess[name])):
        yield f"{name} is off by {errors[name]:.1e} (allowed: {bounds.of(name):.1e})"


def _step_of(name: str) -> float:
    """The step that a quantity belongs to; weights come after all of them."""
    digits = re.search(r"\d+$", name.split(".")[0])
    return int(digits[0]) if digits else np.inf
