"""The learning rate against tables worked out from Megatron-LM's rules."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.config import OptimizerConfig
from megatron_core.errors import ConfigError
from megatron_core.optimizer.lr_schedule import LearningRateSchedule

STYLES = ("constant", "linear", "cosine", "WSD", "inverse-square-root")


def schedule(total: int = 10, **settings) -> LearningRateSchedule:
    return LearningRateSchedule(OptimizerConfig(**{"lr": 1.0, "min_lr": 0.1, **settings}), total)


def table(total: int = 10, **settings) -> list[float]:
    return [schedule(total, **settings).lr(step) for step in range(1, total + 2)]


def expect(rates: list[float], wanted: list[float]) -> None:
    assert rates == pytest.approx(wanted, abs=1e-12)


def test_linear():
    expect(
        table(lr_decay_style="linear", lr_warmup_iters=4, lr_warmup_init=0.2),
        [0.4, 0.6, 0.8, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1],
    )


def test_cosine():
    half = 0.1 + 0.9 * 0.5
    quarter = 0.1 + 0.9 * 0.5 * (math.cos(math.pi / 4) + 1)
    rates = table(8, lr_decay_style="cosine")
    expect([rates[1], rates[3], rates[7], rates[8]], [quarter, half, 0.1, 0.1])


def test_constant_stays_after_the_end():
    expect(table(4, lr_decay_style="constant", lr_warmup_iters=2, lr_decay_iters=3), [0.5, 1, 1, 1, 1])


def test_inverse_square_root():
    rates = table(400, lr_decay_style="inverse-square-root", lr_warmup_iters=4)
    expect([rates[3], rates[15], rates[399], rates[400]], [1.0, 0.5, 0.1, 0.1])
    expect(table(4, lr_decay_style="inverse-square-root", min_lr=0.0)[:4], [1.0, 0.5**0.5, 3**-0.5, 0.5])
    part = table(4, lr_decay_style="inverse-square-root", lr_warmup_fraction=0.16, min_lr=0.0)  # W = 0.64 steps
    expect(part[:4], [0.8, 0.8 * 0.5**0.5, 0.8 * 3**-0.5, 0.4])


@pytest.mark.parametrize(
    ("style", "coefficients"),
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("cosine", [0.5 * (math.cos(math.pi * x / 4) + 1) for x in (1, 2, 3, 4)]),
        ("exponential", [2 * 0.5 ** (x / 4) - 1 for x in (1, 2, 3, 4)]),
        ("minus_sqrt", [1 - math.sqrt(x / 4) for x in (1, 2, 3, 4)]),
    ],
)
def test_wsd(style, coefficients):
    rates = table(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=4, lr_warmup_iters=2)
    expect(rates, [0.5, 1, 1, 1, 1, 1, *(0.1 + 0.9 * c for c in coefficients), 0.1])


def test_wsd_needs_its_last_phase():
    with pytest.raises(ConfigError, match="lr_wsd_decay_iters"):
        schedule(lr_decay_style="WSD")


def test_a_fraction_of_the_decay_steps_warms_up():
    whole = table(20, lr_warmup_fraction=0.25, lr_decay_iters=16)
    expect(whole, table(20, lr_warmup_iters=4, lr_decay_iters=16))
    # 2.5 steps, not rounded: the rate of step 3 is already past the maximum
    expect(table(10, lr_warmup_fraction=0.25)[:3], [0.4, 0.8, 0.1 + 0.9 * (1 - 0.5 / 7.5)])


def test_decay_iters_shorten_and_lengthen_the_decay():
    expect(table(6, lr_decay_iters=3, min_lr=0.0), [2 / 3, 1 / 3, 0, 0, 0, 0, 0])
    assert table(6, lr_decay_iters=12, min_lr=0.0)[5] == pytest.approx(0.5)


@pytest.mark.parametrize("style", STYLES)
def test_the_first_step_of_warm_up_already_moves_the_weights(style):
    assert schedule(lr_decay_style=style, lr_warmup_iters=5, lr_wsd_decay_iters=2).lr(1) == pytest.approx(0.2)


@given(
    style=st.sampled_from(["linear", "cosine", "WSD"]),
    phase=st.sampled_from(["exponential", "linear", "cosine", "minus_sqrt"]),
    total=st.integers(3, 10_000),
    warmup=st.integers(0, 10_000),
)
def test_decay_ends_at_the_last_step_and_never_rises(style, phase, total, warmup):  # C63
    warmup = min(warmup, total - 2)
    rule = schedule(
        total,
        lr_decay_style=style,
        lr_wsd_decay_style=phase,
        lr_warmup_iters=warmup,
        lr_wsd_decay_iters=1 + (total - warmup) // 3,
    )
    assert rule.lr(total) == pytest.approx(0.1)
    assert rule.lr(total - 1) > rule.lr(total)
    steps = sorted({max(warmup, 1), (warmup + total + 1) // 2, total - 1, total, total + 1})
    rates = [rule.lr(step) for step in steps]
    assert rates == sorted(rates, reverse=True)


def test_a_resumed_run_follows_its_own_settings():  # C63
    old, new = {"lr_warmup_iters": 2}, {"lr": 0.5, "min_lr": 0.0, "lr_warmup_iters": 4}
    asked_before = schedule(10, **old)
    asked_before.lr(5)
    assert [schedule(20, **new).lr(step) for step in range(6, 21)] == table(20, **new)[5:20]
    assert table(10, **old)[:5] == [asked_before.lr(step) for step in range(1, 6)]


def test_by_samples_it_is_the_same_curve_over_samples():
    """Steps of 4 sequences: sample 4 n has the rate of step n, and growing batches reach it in fewer steps."""
    steps = schedule(10, lr_decay_style="cosine", lr_warmup_iters=2)
    settings = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_warmup_samples=8)
    samples = LearningRateSchedule(settings, 40, by_samples=True)
    expect([samples.lr(4 * n) for n in range(1, 12)], [steps.lr(n) for n in range(1, 12)])
    shorter = LearningRateSchedule(replace(settings, lr_decay_samples=20), 40, by_samples=True)
    assert shorter.lr(20) == shorter.lr(30) == 0.1 < samples.lr(20)


def test_wsd_by_samples():
    settings = OptimizerConfig(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_style="linear", lr_wsd_decay_samples=10)
    rates = LearningRateSchedule(settings, 40, by_samples=True)
    expect([rates.lr(30), rates.lr(35), rates.lr(40)], [1.0, 0.5, 0.0])
    with pytest.raises(ConfigError):
        LearningRateSchedule(replace(settings, lr_wsd_decay_samples=None), 40, by_samples=True)


def test_weight_decay_grows_as_megatrons() -> None:
    """Ratio r = n / N: start + r (end - start), or with (cos(pi (1 - r)) + 1) / 2 instead of r."""
    ends = {"start_weight_decay": 0.1, "end_weight_decay": 0.5}
    linear, cosine = (schedule(4, weight_decay_incr_style=style, **ends) for style in ("linear", "cosine"))
    assert [linear.weight_decay(n) for n in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5])
    shares = [(math.cos(math.pi * (1 - n / 4)) + 1) / 2 for n in range(5)]
    assert [cosine.weight_decay(n) for n in range(5)] == pytest.approx([0.1 + 0.4 * share for share in shares])
    assert schedule(4, weight_decay=0.3).weight_decay(2) == 0.3
