"""A model with frozen parts, in layouts that also shard them."""

from __future__ import annotations

from torch import nn

from examples.custom_model.verify import NextItemUnderTest
from megatron_core.parallel import ParallelGroups
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.verify import ModuleExperiment, check_parity


class PartlyFrozen(NextItemUnderTest):
    """Embedding, a norm and the matrices of two blocks do not change."""

    def build(self, stage: int, num_stages: int, groups: ParallelGroups, options: ModelParallelConfig) -> nn.Module:
        module = super().build(stage, num_stages, groups, options)
        for name, parameter in module.named_parameters():
            if name.startswith(("table", "blocks.1.up", "blocks.2.")):
                parameter.requires_grad_(False)
        return module


def test_layouts_compute_what_one_process_computes() -> None:
    layouts = ["dp2 zero3", "dp2 zero3 overlap", "tp2 dp2 sp zero3", "pp2 dp2 zero3"]
    report = check_parity(ModuleExperiment(PartlyFrozen()), layouts)
    assert [fault for row in report.rows for fault in row.faults] == []
