"""With ``--layout-invariant`` every layout gives the bits of one process: losses, gradients, norms and weights."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.verify import trace_training
from megatron_core.verify.bounds import FLOAT64_BOUND, relative_errors
from tests.parity.invariant_rows import BFLOAT16, CANDIDATES, FLOAT32, SUPPORTED, differences, refusal
from tests.parity.rows import BASE


@pytest.mark.drawn(1)
@pytest.mark.parametrize("row", SUPPORTED)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_bits_are_those_of_one_process(row: str, dtype: dict) -> None:
    assert differences(row, dtype) == []


def test_the_row_without_the_flag_differs() -> None:
    """Otherwise the comparison would show nothing."""
    assert differences("tp2", FLOAT32 | {"layout_invariant": False}) != []


def test_sums_are_those_of_one_process_in_float64() -> None:
    """Addends are rounded to 2^-44 and losses to 2^-24; a large epsilon keeps Adam from magnifying tiny gradients."""
    model = BASE | {"adam_eps": 1e-3}
    found = trace_training(RunConfig.from_flat(model | {"layout_invariant": True}), 1)
    errors = relative_errors(found, trace_training(RunConfig.from_flat(model), 1))
    assert max(error for name, error in errors.items() if name.startswith("loss")) < 1e-8
    assert max(error for name, error in errors.items() if not name.startswith("loss")) < FLOAT64_BOUND


def test_most_rows_are_supported() -> None:
    refused = {row: reason for row in CANDIDATES if (reason := refusal(row)) is not None}
    assert len(CANDIDATES) - len(refused) > 100, refused
