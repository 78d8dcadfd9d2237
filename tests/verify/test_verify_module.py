"""Wrong plans and planted defects of tensor parallelism are named by ``verify_module``."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatron_core.errors import LayoutError
from megatron_core.verify import ModuleReport, verify_module
from tests.defects.plant import planted
from tests.training.engine.models import model_of, samples_of

TENSOR = "training.engine.tensor:"


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
    faults = [each for each in _verify("qwen3", plan=_plan(q_norm=None)).faults if each.startswith("grad0")]
    assert len(faults) == 3
    for fault in faults:
        assert "self_attn.q_norm.weight" in fault and "their sum is missing" in fault


def test_wrong_style_is_a_fault() -> None:
    (fault,) = _verify("qwen3", plan=_plan(o_proj="colwise")).faults
    assert "the split module fails" in fault and "shapes" in fault


@pytest.mark.parametrize(
    ("target", "old", "new", "expected"),
    [
        ("ParallelLinear.forward", "copy_to_region(x, self.group)", "x", "grad0.transformer.h.0.ln_1.weight"),
        ("ParallelLinear.forward", "reduce_from_region(self", "(lambda y, _: y)(self", "loss0"),
        ("_Splitting._whole", "partial_grad=partial", "partial_grad=True", "is 2 times the right value"),
        ("_Splitting._split", "parts > 1:", "parts > 9:", "loss0"),
    ],
)
def test_planted_defects_are_named(target: str, old: str, new: str, expected: str) -> None:
    with planted(TENSOR + target, old, new):
        faults = _verify("gpt2").faults
    assert any(expected in fault for fault in faults), faults


def test_layout_must_fit() -> None:
    with pytest.raises(LayoutError, match="must have tensor and data parallelism over world_size=2"):
        _verify("gpt2", layout="tp2 dp2")
