"""The example of a custom model."""

from __future__ import annotations

import pytest
import torch

from examples.custom_model.model import MovingAverage
from examples.custom_model.verify import NextItemUnderTest
from megatron_core.errors import LayoutError
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.verify import ModuleExperiment, check_parity


@pytest.mark.drawn(1)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_it_computes_the_same_in_every_layout(dtype: str) -> None:
    layouts = ["tp2 sp", "cp2", "pp2 v2", "tp2 dp2 sp zero1 overlap"]
    report = check_parity(ModuleExperiment(NextItemUnderTest()), layouts, dtype=dtype)
    assert [fault for row in report.rows for fault in row.faults] == []


def test_a_gradient_not_marked_as_partial_is_found() -> None:  # C17
    report = check_parity(ModuleExperiment(NextItemUnderTest(forget=True), steps=1), ["tp2", "tp2 sp"])
    assert [row.holds for row in report.rows] == [True, False]
    assert "norm.weight" in report.rows[1].faults[0]
    assert report.rows[1].gradient.where.endswith("norm.weight")


def test_moving_average_is_the_recurrence() -> None:
    average = MovingAverage(3, ModelParallelConfig(params_dtype=torch.float64), 0, 1)
    torch.nn.init.normal_(average.decay)
    x, keep = torch.randn(5, 2, 3, dtype=torch.float64), torch.sigmoid(average.decay)
    state, expected = torch.zeros(2, 3, dtype=torch.float64), []
    for step in x:
        state = keep * state + (1.0 - keep) * step
        expected.append(state)
    torch.testing.assert_close(average(x), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_a_batch_that_does_not_divide() -> None:
    report = check_parity(ModuleExperiment(NextItemUnderTest(), global_batch_size=3), ["dp2"])
    assert "global_batch_size=3 is not a multiple of micro_batch_size x dp = 1 x 2" in report.rows[0].faults[0]


class WithoutShape(NextItemUnderTest):
    """Does not define the shape of messages between stages."""

    def message_shape(self, batch: dict[str, torch.Tensor]) -> tuple[int, ...]:
        return super(NextItemUnderTest, self).message_shape(batch)


def test_a_pipeline_needs_to_know_the_shape_of_messages() -> None:
    report = check_parity(ModuleExperiment(WithoutShape(), steps=1), ["tp2", "pp2"])
    assert [row.holds for row in report.rows] == [True, False]
    assert "WithoutShape defines no message_shape" in report.rows[1].faults[0]
    assert LayoutError.__name__ in report.rows[1].faults[0]
