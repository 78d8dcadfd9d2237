"""Loss scales against Megatron-LM's DynamicGradScaler, step by step."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.loss_scaling.scale import DynamicLossScale
from megatron_core.optimizer.loss_scale import LossScale


def scales(updates: str, **settings) -> list[float]:
    """The scale after each update; ``x`` is an overflow, ``.`` a good step."""
    scale = DynamicLossScale(**{"initial": 64.0, "minimum": 1.0, "window": 3, "hysteresis": 2, **settings})
    seen = []
    for mark in updates:
        scale.update(mark == "x")
        seen.append(scale.scale)
    return seen


def test_the_scale_grows_after_a_window_of_good_steps():
    assert scales("......") == [64, 64, 128, 128, 128, 256]


def test_an_overflow_starts_the_window_anew():  # C47
    assert scales("..x...") == [64, 64, 64, 64, 64, 128]


def test_the_first_overflows_are_forgiven_and_all_later_ones_halve():
    assert scales("xxx") == [64, 32, 16]
    assert scales("xxx", hysteresis=1) == [32, 16, 8]


def test_good_steps_alone_do_not_bring_the_chances_back_but_growth_does():
    assert scales("x..x") == [64, 64, 64, 32]
    assert scales("x...xx") == [64, 64, 64, 128, 128, 64]


def test_the_scale_stays_above_its_minimum():
    assert scales("xxxx", minimum=20.0, hysteresis=1) == [32, 20, 20, 20]


def test_factors_can_be_chosen():
    assert scales("...xx", growth_factor=4.0, backoff_factor=0.25) == [64, 64, 256, 256, 64]


@given(before=st.text("x.", max_size=30), after=st.text("x.", max_size=30))
def test_a_saved_scale_goes_on_as_if_never_stopped(before, after):
    make = {"initial": 2.0**16, "minimum": 1.0, "window": 3, "hysteresis": 2}
    one, other = DynamicLossScale(**make), DynamicLossScale(**make)
    for mark in before:
        one.update(mark == "x")
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for mark in after:
        one.update(mark == "x")
        other.update(mark == "x")
    assert one.state_dict() == other.state_dict()


def test_a_shorter_window_than_the_saved_good_steps_ends_at_once() -> None:
    scale = DynamicLossScale(initial=64.0, minimum=1.0, window=3)
    scale.load_state_dict({"scale": 64.0, "growth_tracker": 7, "hysteresis_tracker": 2})
    scale.update(False)
    assert scale.scale == 128.0


def test_a_constant_scale_never_changes():
    scale = LossScale(128)
    scale.update(True)
    scale.load_state_dict({"scale": 2.0})
    assert scale.scale == 128.0 and scale.state_dict() == {}


def test_states_of_the_two_kinds_meet_without_harm():
    scale = DynamicLossScale(64.0, 1.0)
    scale.load_state_dict(LossScale(8.0).state_dict())
    assert scale.scale == 64.0


@pytest.mark.parametrize("state", [{"scale": 2.0}, {"scale": 0, "growth_tracker": 0, "hysteresis_tracker": 1}])
def test_a_broken_state_is_refused(state):
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        DynamicLossScale(64.0, 1.0).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"minimum": 0.0}, "min_loss_scale=0.0"),
        ({"initial": 0.5}, "initial_loss_scale=0.5"),
        ({"growth_factor": 1.0}, "growth_factor=1.0"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0"),
        ({"window": 0}, "loss_scale_window=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ],
)
def test_settings_outside_their_range_are_named(settings, name):
    with pytest.raises(ConfigError, match=name):
        DynamicLossScale(**{"initial": 64.0, "minimum": 1.0, **settings})


def test_a_constant_scale_is_above_zero():
    with pytest.raises(ConfigError, match="loss_scale=0"):
        LossScale(0)
