"""Wrong plans and planted defects of tensor parallelism are named by ``verify_module``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_core.errors import LayoutError
from megatron_core.verify import ModuleReport, verify_module
from tests.any_model.attentions import Attention, Model
from tests.any_model.models import model_of, samples_of
from tests.defects.plant import planted

TENSOR = "any_model.tensor:"


def _verify(name: str, **options: Any) -> ModuleReport:
    samples = samples_of(name, 8)
    batches = [torch.utils.data.default_collate(samples[start : start + 4]) for start in (0, 4)]
    return verify_module(partial(model_of, name), batches, **options)


def _plan(**changes: str | None) -> dict[str, str]:
    plan = {**model_of("qwen3")._tp_plan, **{f"model.layers.*.self_attn.{n}": s for n, s in changes.items()}}
    return {name: style for name, style in plan.items() if style is not None}


@pytest.mark.parametrize(("name", "layout"), [("gpt2", "tp2"), ("mixtral", "tp2 dp2 zero1")])
def test_correct_plans_agree(name: str, layout: str) -> None:
    report = _verify(name, layout=layout, world_size=4 if "dp2" in layout else 2)
    assert report.agrees, report.faults
    assert len(report.errors) > 20 and max(report.errors.values()) < 1e-12


def test_partial_gradient_is_named() -> None:
    (fault,) = _verify("qwen3", plan=_plan(q_norm=None)).faults
    assert "model.layers.0.self_attn" in fault and "the gradient of q_norm.weight is off by" in fault
    assert fault.endswith("their sum is missing; give it, or its module, the style replicated_with_grad_allreduce)")


def test_partial_gradient_outside_of_split_modules_is_named() -> None:
    """The scale of the queries belongs to a module around the attention, which reads it."""
    batches = [torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(number)) for number in range(2)]
    faults = [each for each in verify_module(BorrowedScale, batches).faults if each.startswith("grad0")]
    assert len(faults) == 1
    assert "grad0.scale is off by" in faults[0] and "their sum is missing" in faults[0]


class BorrowedScale(Model):
    """An attention that reads a parameter of the model."""

    def __init__(self) -> None:
        super().__init__(Attention)
        self.scale = torch.nn.Parameter(torch.ones(()))
        attention: Any = self.layers[0]["attn"]
        attention.divide = self.scaled

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, 8)) * self.scale


def test_wrong_style_is_a_fault() -> None:
    (fault,) = _verify("qwen3", plan=_plan(o_proj="colwise")).faults
    assert "the split module fails" in fault and "there is no row-parallel layer that sums its output" in fault


@pytest.mark.parametrize(
    ("target", "old", "new", "expected"),
    [
        ("split_product", "copy_to_region(x, group)", "x", "the gradient of input 0 is off by"),
        ("split_product", "reduce_from_region(product", "(lambda y, _: y)(product", "output 0 is off by"),
        ("_Splitting._whole", "partial_grad=partial", "partial_grad=True", "the gradient of c_proj.bias is off by 1.0"),
        ("_Splitting._split", "matrices > 1:", "matrices > 9:", "output 0 is off by"),
    ],
)
def test_planted_defects_are_named(target: str, old: str, new: str, expected: str) -> None:
    with planted(TENSOR + target, old, new):
        faults = _verify("gpt2").faults
    assert any(expected in fault and "transformer.h.0" in fault for fault in faults), faults


def test_defects_outside_of_split_modules_are_named() -> None:
    """The embedding is split by the plan, but is outside of attention and feed-forward layers."""
    with planted(
        "any_model.tensor_embedding:ParallelEmbedding.forward", "reduce_from_region(rows, self.group)", "rows"
    ):
        faults = _verify("qwen3").faults
    assert any("its inputs differ between the tensor-parallel ranks 0 and 1" in fault for fault in faults), faults


def test_layout_must_fit() -> None:
    with pytest.raises(LayoutError, match="must have tensor and data parallelism over world_size=2"):
        _verify("gpt2", layout="tp2 dp2")
