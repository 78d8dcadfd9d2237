"""Layouts of models in which sequences of a micro-batch affect each other, and of runs without a batch size."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_core.commands.verify_layout import LayoutOptions, task_of
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.planner.layout import Layout
from megatron_core.verify import GPTExperiment, check_bits, check_parity, shrunk
from megatron_core.verify.shrink import at_full_size
from megatron_core.verify.together import incomparable

EXPERTS = {"num_layers": 2, "num_attention_heads": 2, "num_experts": 4, "swiglu": True, "disable_bias_linear": True}
OF_RANK = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "capacity": {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "moe_expert_capacity_factor": 1.0,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "further": {"moe_further_balancing_types": ("aux_loss",), "moe_further_aux_loss_coeffs": (0.2,)},
    "fp8 tensorwise": {"fp8_format": "e4m3", "fp8_recipe": "tensorwise"},
    "fp8 delayed": {"fp8_format": "hybrid"},
    "mean of means": {"calculate_per_token_loss": False},
}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}


@dataclass(frozen=True)
class WithoutReference(GPTExperiment):
    """Every layout is compared with the same run of one process."""

    def reference(self, layout: Layout) -> GPTExperiment:
        return self


@pytest.mark.every_case
@pytest.mark.parametrize("name", [*OF_RANK, "global_aux_loss"])
def test_one_process_has_the_micro_batches_of_the_layout(name: str) -> None:
    layouts = [Layout.parse(text) for text in ("pp2", "dp2 zero2")]
    config = shrunk(RunConfig.from_flat(EXPERTS | (OF_RANK | {"global_aux_loss": GLOBAL})[name]), layouts)
    assert config.training.micro_batch_size == 2  # several sequences in the pipeline, too
    report = check_parity(GPTExperiment(config, steps=1, few_micro_batches=True), layouts)
    assert [fault for row in report.rows for fault in row.faults] == []
    # The comparison detects other micro-batches.
    (row,) = check_parity(WithoutReference(config, steps=1, few_micro_batches=True), layouts[:1]).rows
    assert row.gradient is not None and row.gradient.error > 1e-3


def test_the_noise_of_rounding_is_that_of_the_same_micro_batches() -> None:
    config = shrunk(RunConfig.from_flat(EXPERTS | OF_RANK["sinkhorn"]), [Layout.parse("pp2")])
    report = check_parity(GPTExperiment(config, 1, few_micro_batches=True), ["pp2", "dp2"], dtype="float32")
    assert [row.layout for row in report.rows] == ["1 process", "pp2", "1 process for dp2", "dp2"]
    assert report.holds


def test_equal_bits_of_the_same_micro_batches() -> None:
    model = {"num_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "layout_invariant": True}
    report = check_bits(GPTExperiment(shrunk(RunConfig.from_flat(model), [Layout()]), 1), ["pp2", "dp2"])
    assert report.holds and report.steps == 1


def test_global_batches_without_a_size_are_those_of_the_layout() -> None:
    """At full size the number of samples is micro_batch_size x replicas."""
    model = {"num_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "seq_length": 8, "micro_batch_size": 2}
    config = at_full_size(RunConfig.from_flat(model | {"clip_grad": 0.0}), 32)
    assert check_parity(GPTExperiment(config, steps=2), ["dp2", "tp2"]).holds
    assert not check_parity(WithoutReference(config, steps=2), ["dp2"]).holds


def test_layouts_that_no_process_equals_are_refused() -> None:
    means = RunConfig.from_flat(OF_RANK["mean of means"])
    assert "each rank averages the losses of its own part" in (incomparable(means, Layout.parse("cp2")) or "")
    both = EXPERTS | GLOBAL | OF_RANK["further"]
    config = RunConfig.from_flat(both)
    assert incomparable(config, Layout.parse("pp2 tp2")) is None
    assert "global_aux_loss for those of all dp=2 replicas" in (incomparable(config, Layout.parse("dp2")) or "")
    with pytest.raises(ConfigError, match="layout 'dp2' cannot be compared"):
        task_of(config, LayoutOptions(layouts=("dp2",)))
    task = task_of(config, LayoutOptions(all=True, world_size=(2,)))
    assert {layout.dp for layout in task.layouts} == {1}
    assert {Layout.parse(name).dp for name in task.refused} == {2}
