"""Comparison of the bits of layouts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from examples.custom_model.verify import NextItemUnderTest
from megatron_core.errors import ConfigError
from megatron_core.planner.layout import Layout
from megatron_core.reports.hash_records import HashRecord
from megatron_core.verify import ModuleExperiment, check_bits
from megatron_core.verify.ranks import this_world

TENSORS = {"gradients": {"b.weight": "1", "a.weight": "2"}}
STEP = HashRecord(iteration=1, loss=2.0, grad_norm=1.0, gradients="g", weights="w", by_tensor=TENSORS)


@dataclass(frozen=True)
class Recorded:
    """An experiment with given results; those of tp2 are ``changes``, on the ranks ``changed``."""

    changes: dict
    changed: tuple[int, ...] = (0, 1)

    def hashes(self, layout: Layout, dtype: str) -> list[HashRecord]:
        if "raises" in self.changes and layout.tp == 2:
            raise ValueError("no such layout")
        own = self.changes if layout.tp == 2 and this_world().rank in self.changed else {}
        return [replace(STEP, **own), replace(STEP, iteration=2)]


def test_equal_bits() -> None:
    report = check_bits(Recorded({}), ["tp2", "dp2"])
    assert report.holds and report.steps == 2
    assert report.summary.startswith("2 of 2 layouts have the bits of one process in float32 over ")
    assert [row["verdict"] for row in report.as_dict()["rows"]] == ["equal bits"] * 2


@pytest.mark.parametrize(
    ("experiment", "verdict"),
    [
        (Recorded({"grad_norm": 1.0000000000000002}), "iteration 1: the gradient norm differs first"),
        (Recorded({"gradients": "h", "by_tensor": {"gradients": {"b.weight": "1", "a.weight": "3"}}}),
         "iteration 1: the gradient of a.weight differs first, in the module a; 1 of 2 tensors"),
        (Recorded({"differing_copies": ("weights: a.weight",)}), "iteration 1: copies on several ranks differ"),
        (Recorded({"weights": "x"}, changed=(1,)), "rank 1 and rank 0 report different results (iteration 1"),
        (Recorded({"iteration": 7}), "has records of the iterations 7, 2 instead of 1, 2"),
        (Recorded({"raises": True}), "fails: ValueError: no such layout"),
    ],
    ids=["norm", "gradient", "copies", "rank", "steps", "error"],
)  # fmt: skip
def test_differences(experiment: Recorded, verdict: str) -> None:
    report = check_bits(experiment, ["tp2", "dp2"])
    assert [row.holds for row in report.rows] == [False, True] and not report.holds
    assert report.rows[0].verdict.startswith(verdict)


def test_losses_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ConfigError, match="not finite"):
        check_bits(RecordedNan(), ["tp2"])
    with pytest.raises(ConfigError, match="dtype=float8"):
        check_bits(Recorded({}), ["tp2"], dtype="float8")


class RecordedNan:
    """An experiment whose loss is NaN."""

    def hashes(self, layout: Layout, dtype: str) -> list[HashRecord]:
        return [replace(STEP, loss=float("nan"))]


def test_a_model_of_ones_own() -> None:
    """Copies agree and initial weights are equal; sums of two ranks have other bits."""
    (row,) = check_bits(ModuleExperiment(NextItemUnderTest(), steps=1), ["dp2"]).rows
    assert not row.faults and row.difference is not None
    assert (row.difference.iteration, row.difference.quantity) == (1, "gradients")
