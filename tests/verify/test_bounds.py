"""Errors and their bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_core.verify.bounds import EPSILON, FLOAT64_BOUND, NOISE_FACTOR, Bounds, beyond, relative_errors
from megatron_core.verify.trace import Trace


def trace(loss: float = 2.0, norm: float = 4.0, **tensors: list[float]) -> Trace:
    values = {"a": [1.0, -2.0]} | tensors
    return Trace([loss], [norm], {f"grad0.{name}": np.array(v) for name, v in values.items()}, [])


def test_errors_are_relative_to_the_largest_element() -> None:
    errors = relative_errors(trace(loss=2.5, norm=3.0, a=[1.5, -2.0]), trace())
    assert errors == {"loss0": 0.25, "norm0": 0.25, "grad0.a": 0.25}


def test_a_true_zero_is_compared_absolutely() -> None:
    assert relative_errors(trace(b=[0.0, 1e-3]), trace(b=[0.0, 0.0]))["grad0.b"] == 1e-3


def test_rounding_errors_of_a_sum_that_is_0_are_no_failure() -> None:
    baseline = trace(b=[3e-18, 0.0], c=[1e-5])
    errors = relative_errors(trace(b=[0.0, -2e-18], c=[1e-5 + 1e-13]), baseline)
    assert errors["grad0.b"] == pytest.approx(3e-18 / 2e-6) and errors["grad0.c"] == pytest.approx(1e-8, rel=1e-4)
    assert [sentence.split()[0] for sentence in beyond(errors, Bounds("float64"))] == ["grad0.c"]


@pytest.mark.parametrize(
    "found",
    [trace(a=[np.nan, -2.0]), trace(a=[np.inf, -2.0]), trace(a=[1.0]), trace(extra=[0.0])],
    ids=["nan", "inf", "another shape", "a tensor that the baseline has not"],
)
def test_what_cannot_be_compared_is_infinitely_far(found: Trace) -> None:
    errors = relative_errors(found, trace())
    assert max(errors.values()) == np.inf
    assert len(list(beyond(errors, Bounds("float64")))) == 1


def test_a_missing_tensor_is_infinitely_far() -> None:
    assert relative_errors(trace(), trace(b=[1.0]))["grad0.b"] == np.inf


def test_a_loss_that_is_no_number_is_beyond_every_bound() -> None:
    errors = relative_errors(trace(loss=float("nan")), trace())
    assert [sentence.split()[0] for sentence in beyond(errors, Bounds("float64"))] == ["loss0"]


def test_the_first_step_comes_first_then_the_worst() -> None:
    errors = {"weight.a": 1.0, "grad1.a": 1.0, "grad0.a": 1e-3, "grad0.b": 1e-2, "loss0": 1e-12}
    names = [sentence.split()[0] for sentence in beyond(errors, Bounds("float64"))]
    assert names == ["grad0.b", "grad0.a", "grad1.a", "weight.a"]


def test_float64_has_one_bound() -> None:
    assert Bounds("float64").of("anything") == FLOAT64_BOUND


def test_other_dtypes_are_held_to_the_noise_of_one_process() -> None:
    """Each tensor has its own bound, independent of how exact or noisy similar ones are."""
    noise = {"loss0": 0.0, "weight.a": 1e-6, "weight.b": 4e-5, "weight.c": 0.0}
    bounds = Bounds("float32", noise)
    assert bounds.of("weight.b") == NOISE_FACTOR * 4e-5
    assert bounds.of("weight.c") == bounds.of("loss0") == NOISE_FACTOR * EPSILON["float32"] / 2
    errors = {"weight.a": 5.1e-6, "weight.b": 1.9e-4, "weight.c": 2e-7}
    assert [sentence.split()[0] for sentence in beyond(errors, bounds)] == ["weight.a"]


def test_epsilons_are_those_of_torch() -> None:
    assert {name: torch.finfo(getattr(torch, name)).eps for name in EPSILON} == EPSILON
