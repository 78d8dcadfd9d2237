"""A growing value: exactly Megatron-LM's rule, and the steps of a training run that follow from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.config import TrainingConfig
from megatron_core.config.growth import Steps, constant
from megatron_core.config.validate import problems
from megatron_core.features.batch_growth.settings import Ramp, parse_steps
from tests.runs import tiny_config


def test_every_value_has_an_equal_share() -> None:
    ramp = Ramp(start=32, increment=32, samples=300, end=128)
    assert [ramp.at(c) for c in (0, 99, 100, 199, 200, 299, 300, 10**12)] == [32, 32, 64, 64, 96, 96, 128, 128]


def test_no_ramp_is_the_end_from_the_start() -> None:
    assert [constant(7).at(c) for c in (0, 1, 10**9)] == [7, 7, 7]


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 9), st.integers(1, 10**7))
def test_borders_are_exact(start: int, increment: int, increments: int, samples: int) -> None:
    ramp = Ramp(start, increment, samples, start + increments * increment)
    for k in range(increments + 1):
        border = -(-k * samples // increments)  # the first sample in the k-th share
        assert ramp.at(border) >= start + k * increment
        assert border == 0 or ramp.at(border - 1) < start + k * increment
    assert ramp.at(samples - 1) < ramp.end == ramp.at(samples)


@pytest.mark.parametrize("consumed", [0, 5, 24, 200])
@pytest.mark.parametrize("train_samples", [0, 7, 8, 9, 100, 1001])
def test_steps_left_are_those_that_one_would_count(train_samples: int, consumed: int) -> None:
    training = TrainingConfig(
        micro_batch_size=2, global_batch_size=20, rampup_batch_size=(4, 4, 90), train_samples=train_samples
    )
    ramp, steps, at = training.batch_growth(2, 64), 0, consumed
    while at + ramp.at(at) <= train_samples:
        at, steps = at + ramp.at(at), steps + 1
    assert training.steps_left(2, iteration=3, consumed_samples=consumed, seq_length=64) == steps


SCHEDULE = ("0:8", "1.5K:16", "3K:32")


def test_each_size_of_a_schedule_begins_with_its_tokens() -> None:
    steps = Steps(parse_steps(SCHEDULE, 10))
    assert steps.begins == ((0, 8), (150, 16), (300, 32)) and steps.samples == 300
    assert [steps.at(c) for c in (0, 149, 150, 299, 300, 10**9)] == [8, 8, 16, 16, 32, 32]
    assert parse_steps(("0:384 200B:768,400B:1152",), 4096) == ((0, 384), (48828125, 768), (97656250, 1152))
    assert parse_steps(("0:8", "5"), 10) == ()


def test_steps_of_a_schedule_are_those_that_one_would_count() -> None:
    training = TrainingConfig(micro_batch_size=2, step_batch_size_schedule=SCHEDULE, train_samples=500)
    assert training.final_batch_size(4) == 32
    ramp, steps, at = training.batch_growth(4, 10), 0, 0
    while at + ramp.at(at) <= 500:
        at, steps = at + ramp.at(at), steps + 1
    assert training.num_iterations(4, 10) == steps


@pytest.mark.parametrize("ramp", [(2, 3, 100), (4, 2, 37), (1, 1, 1), (8, 1, 1000)])
@pytest.mark.parametrize("samples", [0, 1, 50, 333, 2000])
def test_steps_counted_by_size_are_those_counted_one_by_one(ramp: tuple[int, int, int], samples: int) -> None:
    training = TrainingConfig(train_samples=samples, rampup_batch_size=ramp, global_batch_size=ramp[0] + 6 * ramp[1])
    size, consumed, steps = Ramp(*ramp, training.global_batch_size), 0, 0
    while consumed + size.at(consumed) <= samples:
        consumed, steps = consumed + size.at(consumed), steps + 1
    assert training.num_iterations(1, 8) == steps


def test_ramps_over_any_number_of_samples_are_counted_at_once() -> None:
    """A loop over the steps would take days."""
    settings = {"train_iters": None, "train_samples": 10**15, "global_batch_size": 1000, "micro_batch_size": 1}
    assert not list(problems(tiny_config(rampup_batch_size=(1, 1, 10**14), **settings), 1))
    found = list(problems(tiny_config(rampup_batch_size=(1, 1, 10**14), **settings | {"global_batch_size": 10**12}), 1))
    assert any("makes 999999999999 increments; legal: up to 100000" in text for text in found)
    assert any("micro-batches in a step" in text for text in found)


@pytest.mark.parametrize("ramp", [(5, 3, 10), (5, 0, 10), (0, 1, 10), (9, 1, 5), (1, 1, 0), (-4, 3, 10**14)])
def test_a_ramp_that_cannot_be_is_told_and_not_counted(ramp: tuple[int, int, int]) -> None:
    settings = {"train_iters": None, "train_samples": 10**15, "global_batch_size": 1, "micro_batch_size": 1}
    assert any(
        text.startswith("rampup_batch_size=") for text in problems(tiny_config(rampup_batch_size=ramp, **settings), 1)
    )
