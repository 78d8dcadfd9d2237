"""The first wrong tensor of a layout that fails."""

from __future__ import annotations

import re

import numpy as np
import pytest

from megatron_core.config import RunConfig
from megatron_core.planner.layout import Layout
from megatron_core.verify import GPTExperiment, check_parity, shrunk
from megatron_core.verify.culprit import (
    BACKWARD,
    FORWARD,
    ActivationKey,
    RankFindings,
    Reference,
    WrongTensor,
    describe_culprit,
    pattern_of,
)
from megatron_core.verify.table import TerminalTable
from tests.defects.plant import planted

MODEL = {"num_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
DEFECTS = [
    (
        "the sum of a row-parallel linear layer is missing",
        ("tensor_parallel.linear_comm:reduced_output", "elif comm.reduce_output:", "elif False:"),
        "tp2",
        r"output of decoder\.layers\.0\.self_attention\.\w+, in forward, on rank 0 \[pp0 dp0 tp0\] and 1 more rank",
    ),
    (
        "the gradient of a reduce-scatter is too small",
        (
            "tensor_parallel.linear_comm:gather_output_grad",
            "_gathered(grad_y, comm) if",
            "_gathered(grad_y, comm) / 2 if",
        ),
        "tp2 sp",
        r"gradient of the output of .*pre_mlp_layernorm, in backward, on rank 0 .*; right before it: decoder\.layers",
    ),
    (
        "gradients of norms are not summed",
        (
            "transformer.block:TransformerLayer.__init__",
            "self.input_layernorm = norm(spec.input_layernorm)",
            "self.input_layernorm = spec.input_layernorm(context, context.config.hidden_size, partial_grad=False)",
        ),
        "tp2 sp",
        r"gradient of the parameter decoder\.layers\.1\.input_layernorm\.\w+ and 3 more; outputs .* are right",
    ),
    (
        "the norm counts every copy",
        ("data_parallel.buffer:Bucket.is_writer", "self.dp_group.rank() == 0)", "True)"),
        "dp2",
        "the gradient norm; all gradients are right",
    ),
]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("name", "change", "layout", "message"), DEFECTS, ids=[each[0] for each in DEFECTS])
def test_the_first_wrong_tensor_is_named(name: str, change: tuple[str, str, str], layout: str, message: str) -> None:
    config = shrunk(RunConfig.from_flat(MODEL), [Layout.parse(layout)])
    with planted(*change):
        # One process calls none of the changed code: its groups have one rank.
        report = check_parity(GPTExperiment(config, 1, True), [layout], device="simulated")
    (row,) = report.rows
    assert not row.holds
    assert row.culprit.startswith("first wrong: ")
    assert re.search(message, row.culprit), row.culprit
    assert row.culprit in "\n".join(TerminalTable([layout], "float64").lines(row))


def test_order_is_that_of_the_program() -> None:
    """All forwards come before all backwards; ranks and samples do not matter."""
    values = np.ones((2, 3))
    keys = [
        ActivationKey(FORWARD, "a", 0),
        ActivationKey(FORWARD, "b", 0),
        ActivationKey(BACKWARD, "b", 0),
        ActivationKey(BACKWARD, "a", 0),
        ActivationKey(FORWARD, "a", 1),
    ]
    reference = Reference(values=dict.fromkeys(keys, values))
    assert reference.order() == [(FORWARD, "a"), (FORWARD, "b"), (BACKWARD, "b"), (BACKWARD, "a")]
    wrong = {
        (direction, module): WrongTensor(direction, module, f"rank {rank}", 0.1)
        for rank, (direction, module) in enumerate(reference.order()[2:])
    }
    text = (
        "first wrong: gradient of the output of b, in backward, on rank 0 (off by 1.0e-01); the loss is wrong before it"
    )
    right = RankFindings(samples={0, 1})
    assert describe_culprit(reference, [right, RankFindings(tensors=wrong)], {"loss0": 1.0}) == text
    earlier = WrongTensor(FORWARD, "a.weight", "rank 3", 0.1)
    updated = describe_culprit(
        reference, [right, RankFindings({"a.weight": earlier}, wrong)], {"loss1": 1.0, "grad2.b.weight": 1.0}
    )
    assert updated.startswith("first wrong: updated weight a.weight, on rank 3 (off by 1.0e-01); losses")
    assert updated.endswith("; in step 2, all steps before it are right")
    assert "no rank computes 1; the data" in describe_culprit(reference, [RankFindings(samples={0})], {"loss0": 1.0})


def test_without_a_wrong_tensor_the_first_wrong_quantity_is_named() -> None:
    keys = [
        ActivationKey(FORWARD, "a", 0),
        ActivationKey(FORWARD, "b", 0),
        ActivationKey(BACKWARD, "b", 0),
        ActivationKey(BACKWARD, "a", 0),
    ]
    reference, right = Reference(values=dict.fromkeys(keys, np.ones((2, 3)))), [RankFindings(samples={0})]
    assert "the loss that is reported" in describe_culprit(reference, right, {"loss0": 1.0})
    first = describe_culprit(reference, right, {"grad0.a.weight": 1.0, "grad0.b.weight": 1.0, "grad1.b.weight": 1.0})
    assert first.startswith("first wrong: gradient of the parameter b.weight and 1 more; ")
    assert "updated weight a.weight and 1 more; " in describe_culprit(
        reference, right, {"weight.b.x": 1.0, "weight.a.weight": 1.0}
    )
    assert "report0.load of layer 1;" in describe_culprit(reference, right, {"report0.load of layer 1": 1.0})
    later = describe_culprit(reference, right, {"grad1.a.weight": 1.0, "weight.a.weight": 1.0})
    assert "gradient of the parameter a.weight; " in later
    assert "gradients of the step before are kept; in step 2," in later


def test_the_pattern_of_a_difference_is_named() -> None:
    whole = np.arange(24.0).reshape(8, 3) + 1
    assert pattern_of(whole / 2, whole, 1e-9).startswith("it is 0.5 times the right one")
    assert pattern_of(0 * whole, whole, 1e-9).startswith("it is 0: ")
    assert "in other places" in pattern_of(whole[4:], whole[:4], 1e-9, whole)
    masked = whole.copy()
    masked[6:, 0] += 1
    assert pattern_of(masked, whole, 1e-9).startswith("2 of 8 rows differ, from row 6 on")
    assert pattern_of(whole**2, whole, 1e-9) == ""
    assert pattern_of(whole[:2], whole, 1e-9) == "its shape differs"
