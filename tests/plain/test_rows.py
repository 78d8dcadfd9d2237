"""The engine trains as the plain model: losses, every gradient, norms, loads, and weights after several steps."""

from __future__ import annotations

from functools import cache

import pytest

from megatron_core.config import RunConfig
from tests.parity.every_row import cover, features
from tests.plain.engine import BASE, beyond, differences, engine_trace, samples_of, settings_of, start_of
from tests.plain.rows import FURTHER_LAYOUTS, LAYOUTS, ROWS, SCALED_LOSS, Values
from tests.plain.training import Record, train
from tests.sample import WHOLE_MATRIX

STEPS = 3
SAMPLE = cover({row: features(settings) for row, settings in ROWS.items()}, lambda row: 1)
"""The rows of the default run: every setting of every row, and every value of a switch or a choice."""


def wrong(
    values: Values,
    world_size: int = 1,
    layout: Values | None = None,
    loss_scale: float | None = None,
    steps: int = STEPS,
) -> list[str]:
    """The quantities in which the engine, in a layout, differs from the plain model, which starts with its weights."""
    trace = engine_trace(values | (layout or {}), steps, world_size, loss_scale)
    settings = settings_of(values)
    record = train(settings, start_of(trace), samples_of(BASE | values, steps * settings.global_batch_size), steps)
    return beyond(differences(trace, record, loss_scale or 1.0))


@pytest.mark.every_case
@pytest.mark.parametrize("row", [row for row in ROWS if WHOLE_MATRIX or row in SAMPLE])
def test_training(row: str) -> None:
    assert wrong(ROWS[row]) == []


@pytest.mark.every_case
@pytest.mark.parametrize("row", LAYOUTS)
def test_training_in_layout(row: str) -> None:
    name, world_size, layout = LAYOUTS[row]
    assert wrong(ROWS[name], world_size, layout) == []


@pytest.mark.whole_matrix
@pytest.mark.parametrize("row", FURTHER_LAYOUTS)
def test_training_in_further_layout(row: str) -> None:
    name, world_size, layout = FURTHER_LAYOUTS[row]
    assert wrong(ROWS[name], world_size, layout) == []


@pytest.mark.every_case
@pytest.mark.parametrize("row", SCALED_LOSS)
def test_training_with_loss_scale(row: str) -> None:
    """A loss scale multiplies the gradients before the update, and has no other effect."""
    assert wrong(ROWS[row], loss_scale=1024.0) == []


@cache
def initial(row: str) -> dict:
    return start_of(engine_trace(ROWS[row], 0))


def plainly(row: str, values: Values) -> Record:
    samples = samples_of(BASE | values, STEPS * (BASE | values)["global_batch_size"])
    return train(settings_of(values), initial(row), samples, STEPS)


UNFIT = (AssertionError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
WITHOUT_EFFECT = {
    ("capacity by position", "moe_pad_expert_input_to_capacity"): "only the sizes of messages",
    ("wide router", "moe_router_dtype"): "only the precision",
    ("no balance", "moe_router_load_balancing_type"): "the default has the coefficient 0",
    ("one group", "num_query_groups"): "1 is the default",
    ("rms norms without weights", "normalization"): "norms without weights are RMS norms",
    ("longrope, long", "longrope_short_factor"): "required, but of shorter texts",
    ("longrope, default magnitude", "longrope_short_factor"): "required, but of shorter texts",
    ("longrope, short", "longrope_long_factor"): "required, but of longer texts",
    ("documents", "tokenizer_type"): "names the end of a document",
    ("documents, positions continue", "tokenizer_type"): "names the end of a document",
    ("dropout in documents", "tokenizer_type"): "names the end of a document",
    ("later tokens, mixed", "tokenizer_type"): "names the end of a document",
    ("streams", "mhc_init_gating_factor"): "of the initial weights, which the plain model receives",
    ("positions restart", "tokenizer_type"): "names the end of a document",
}
"""Settings of rows that change nothing in the plain model, with the reason."""


@pytest.mark.whole_matrix
@pytest.mark.parametrize("row", ROWS)
def test_settings_matter(row: str) -> None:
    """Without any of its settings the plain model of a row computes something else: the comparison sees each."""
    expected = plainly(row, ROWS[row])
    defaults = RunConfig().flat()
    for name in ROWS[row]:
        if (row, name) in WITHOUT_EFFECT or (BASE | ROWS[row])[name] == (BASE | defaults)[name]:
            continue
        values = {key: value for key, value in ROWS[row].items() if key != name}
        try:
            changed = plainly(row, values)
        except UNFIT:  # the other settings, or the weights
            continue
        assert changed.losses != expected.losses or differ(changed, expected), f"{name} has no effect in {row!r}"


def differ(first: Record, second: Record) -> bool:
    """Whether weights or averages differ."""
    pairs = [(first.weights, second.weights), (first.average, second.average)]
    return any(not a[name].equal(b[name]) for a, b in pairs for name in a)
