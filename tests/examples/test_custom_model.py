"""The worked example of a model that is no GPT."""

from __future__ import annotations

import pytest
import torch

from examples.custom_model.model import Memory
from examples.custom_model.prove import ShopVisits
from megatron_core.errors import LayoutError
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.verify import ModuleExperiment, prove


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_it_computes_the_same_in_every_layout(dtype: str) -> None:
    layouts = ["tp2 sp", "pp2 v2", "tp2 dp2 sp zero1 overlap"]
    proof = prove(ModuleExperiment(ShopVisits()), layouts, dtype=dtype)
    assert [fault for row in proof.rows for fault in row.faults] == []


def test_the_forgotten_word_is_found() -> None:  # C17
    proof = prove(ModuleExperiment(ShopVisits(forget=True), steps=1), ["tp2", "tp2 sp"])
    assert [row.holds for row in proof.rows] == [True, False]
    assert "norm.weight" in proof.rows[1].faults[0]
    assert proof.rows[1].gradient.where.endswith("norm.weight")


def test_memory_is_the_recurrence_it_says() -> None:
    memory = Memory(3, ModelParallelConfig(params_dtype=torch.float64), 0, 1)
    torch.nn.init.normal_(memory.memory)
    x, keep = torch.randn(5, 2, 3, dtype=torch.float64), torch.sigmoid(memory.memory)
    state, expected = torch.zeros(2, 3, dtype=torch.float64), []
    for step in x:
        state = keep * state + (1.0 - keep) * step
        expected.append(state)
    torch.testing.assert_close(memory(x), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_a_batch_that_does_not_divide() -> None:
    proof = prove(ModuleExperiment(ShopVisits(), global_batch_size=3), ["dp2"])
    assert "global_batch_size=3 is not a multiple of micro_batch_size x dp = 1 x 2" in proof.rows[0].faults[0]


class WithoutShape(ShopVisits):
    """Says nothing of what travels between its stages."""

    def message_shape(self, batch: dict[str, torch.Tensor]) -> tuple[int, ...]:
        return super(ShopVisits, self).message_shape(batch)


def test_a_pipeline_needs_to_know_the_shape_of_messages() -> None:
    proof = prove(ModuleExperiment(WithoutShape(), steps=1), ["tp2", "pp2"])
    assert [row.holds for row in proof.rows] == [True, False]
    assert "WithoutShape defines no message_shape" in proof.rows[1].faults[0]
    assert LayoutError.__name__ in proof.rows[1].faults[0]
