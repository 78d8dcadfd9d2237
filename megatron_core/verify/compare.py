"""Float noise or a silent failure: how far a training may be from the truth.

The truth is one process in float64. In float64 itself every quantity has to agree with it to ``FLOAT64_BOUND``. In a
narrower dtype rounding moves everything, by an amount that depends on the tensor, so that no single number tells noise
from a failure. What tells it is one process in the same dtype: its distance from the truth is what rounding does to
each tensor, and a layout, which adds the same numbers in another order, may be at most ``NOISE_FACTOR`` times as far.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median

import numpy as np

from megatron_core.verify.record import Trace

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number of each dtype."""
FLOAT64_BOUND = 1e-9
NOISE_FACTOR = 6.0
"""Correct layouts were seen up to 3.1 times as far from the truth as one process, in float32 and in bfloat16."""

Errors = Mapping[str, float]
"""Relative errors by quantity: ``loss0``, ``norm0``, ``grad0.NAME``, ..., ``weight.NAME``."""


def relative_errors(found: Trace, truth: Trace) -> dict[str, float]:
    """Largest deviation of each quantity, relative to its largest element in ``truth``; inf where it is missing."""
    result = {f"loss{i}": _relative(a, b) for i, (a, b) in enumerate(zip(found.losses, truth.losses, strict=True))}
    result |= {f"norm{i}": _relative(a, b) for i, (a, b) in enumerate(zip(found.norms, truth.norms, strict=True))}
    for name, expected in truth.tensors.items():
        values = found.tensors.get(name)
        same_shape = values is not None and values.shape == expected.shape
        result[name] = _relative(values, expected) if same_shape else np.inf
    return result | {name: np.inf for name in found.tensors if name not in truth.tensors}


def _relative(found: np.ndarray | float, expected: np.ndarray | float) -> float:
    difference = float(np.max(np.abs(np.subtract(found, expected)), initial=0.0))
    scale = float(np.max(np.abs(expected), initial=0.0))
    error = difference / scale if scale else difference
    return error if np.isfinite(error) else np.inf


class Bounds:
    """How large each quantity's error may be; ``noise`` are the errors of one process in ``dtype``, None in float64.

    A tensor that one process happens to get all but exactly is held to what is usual for tensors of its kind, and a
    loss or norm to an epsilon.
    """

    def __init__(self, dtype: str, noise: Errors | None = None) -> None:
        self._noise = noise
        self._floor: dict[str, float] = {}
        for kind in {kind_of(name) for name in noise or ()}:
            of_kind = [error for name, error in (noise or {}).items() if kind_of(name) == kind]
            self._floor[kind] = EPSILON[dtype] if kind in ("loss", "norm") else median(of_kind)

    def of(self, name: str) -> float:
        """The largest error that ``name`` may have."""
        if self._noise is None:
            return FLOAT64_BOUND
        return NOISE_FACTOR * max(self._noise.get(name, 0.0), self._floor.get(kind_of(name), 0.0))


def kind_of(name: str) -> str:
    """``loss``, ``norm``, ``grad0``, ..., ``weight``."""
    head = name.split(".")[0]
    return head.rstrip("0123456789") if head.startswith(("loss", "norm")) else head


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
