"""Calls past torch's dispatcher: what they compute is the operator's, and who wants to see operators sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.op_cases import CASES
from megatron_core import ops

SHAPES = ((6, 24), (6, 24), (24,), (24,))


class Seen(TorchDispatchMode):
    """Remembers the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def run(case: str) -> list[Tensor]:
    """Outputs and gradients of a case."""
    torch.manual_seed(0)
    tensors = CASES[case].inputs(8, 256, torch.float32)
    outputs = CASES[case].function(*tensors, backend="native")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])
    return [*outputs, *grads]


@pytest.mark.parametrize("case", sorted(CASES))
def test_both_ways_give_the_same_bits(cpu_body: None, case: str) -> None:
    direct = run(case)
    with Seen() as seen:
        dispatched = run(case)
    assert any(name.startswith("megatron_core::") for name in seen.names)
    assert any(name.startswith("megatron_core::") and "backward" in name for name in seen.names) or case == "rope"
    for ours, theirs in zip(direct, dispatched, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_the_profiler_names_the_operator(cpu_body: None, with_gradient: bool) -> None:
    x, weight = torch.randn(4, 64, requires_grad=with_gradient), torch.ones(64)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        ops.rms_norm(x, weight, backend="native")
    assert "megatron_core::rms_norm" in {event.key for event in profiled.key_averages()}


def test_fake_tensors_are_not_read(cpu_body: None) -> None:
    with FakeTensorMode() as mode:
        x, weight = torch.randn(4, 64, requires_grad=True), torch.ones(64)
        within = ops.rms_norm(x, weight, backend="native")
    after = ops.rms_norm(mode.from_tensor(torch.randn(2, 64)), weight, backend="native")
    assert (within.shape, after.shape) == ((4, 64), (2, 64))
    assert within.grad_fn is not None


def test_transforms_of_functions_reach_the_operator(cpu_body: None) -> None:
    """torch.func.vmap runs operators that have no rule of their own for each example."""
    x, weight = torch.randn(3, 4, 64), torch.ones(64)
    mapped = torch.func.vmap(lambda rows: ops.rms_norm(rows, weight, backend="native"))(x)
    assert torch.equal(mapped, ops.rms_norm(x, weight, backend="native"))


def test_nothing_is_kept_where_no_gradient_is_wanted(cpu_body: None) -> None:
    x, weight = torch.randn(4, 64, requires_grad=True), torch.ones(64)
    with torch.no_grad():
        assert ops.rms_norm(x, weight, backend="native").grad_fn is None
    assert ops.rms_norm(x.detach(), weight, backend="native").grad_fn is None
    assert ops.rms_norm(x, weight, backend="native").grad_fn is not None


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("dispatched", [False, True])
def test_either_output_of_a_fused_norm_may_be_unused(cpu_body: None, which: tuple[int, ...], dispatched: bool) -> None:
    """Gradients of (norm, sum) where only some of the two count; as the same of the reference."""

    def grads(backend: ops.Backend) -> tuple[Tensor | None, ...]:
        torch.manual_seed(0)
        x, residual, weight, bias = (torch.randn(n, requires_grad=True) for n in SHAPES)
        outputs = ops.add_layer_norm(x, residual, weight, bias, backend=backend)
        loss = sum((outputs[i] * torch.arange(24)).sum() for i in which)
        return torch.autograd.grad(loss, (x, residual, weight, bias), allow_unused=True)

    if dispatched:
        with Seen():
            ours = grads("native")
    else:
        ours = grads("native")
    for own, plain in zip(ours, grads("reference"), strict=True):
        if plain is None:
            assert own is None
        else:
            torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("dispatched", [False, True])
def test_second_derivatives_are_refused_with_the_way_out(cpu_body: None, dispatched: bool) -> None:
    x, weight = torch.randn(4, 64, requires_grad=True), torch.ones(64)

    def twice() -> None:
        (dx,) = torch.autograd.grad(ops.rms_norm(x, weight, backend="native").sum(), x, create_graph=True)
        dx.sum().backward()

    with pytest.raises(NotImplementedError, match=r"rms_norm_backward has no backward.*backend='reference'"):
        if dispatched:
            with Seen():
                twice()
        else:
            twice()
