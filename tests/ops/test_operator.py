"""Calls past torch's dispatcher: what they compute is the operator's, and who wants to see operators sees them."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

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


class Functions(TorchFunctionMode):
    """Remembers the names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def goes_direct(y: Tensor) -> bool:
    """Whether a result came past the dispatcher: the operator's own backward has another name."""
    name = y.grad_fn.name()
    assert "megatron_core" in name
    return not name.startswith("GeneratedBackwardFor")


def run(case: str, *, direct: bool) -> list[Tensor]:
    """Outputs and gradients of a case."""
    torch.manual_seed(0)
    tensors = CASES[case].inputs(8, 256, torch.float32)
    outputs = CASES[case].function(*tensors, backend="native")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    if case != "cross_entropy":  # which is differentiated above its operators
        assert goes_direct(outputs[0]) == direct
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])
    return [*outputs, *grads]


@pytest.mark.parametrize("case", sorted(CASES))
def test_both_ways_give_the_same_bits(cpu_body: None, case: str) -> None:
    direct = run(case, direct=True)
    with Seen() as seen:
        dispatched = run(case, direct=False)
    named = [name for name in seen.names if name.startswith("megatron_core::")]
    assert named
    assert any("backward" in name for name in named) or case == "rope"
    for ours, theirs in zip(direct, dispatched, strict=True):
        assert torch.equal(ours, theirs)


def norm(x: Tensor, epsilon: Any = 1e-5) -> Tensor:
    """What the tests below call."""
    return ops.rms_norm(x, torch.ones(x.shape[-1]), epsilon, backend="native")


@pytest.mark.parametrize("epsilon", [0, 1, np.float32(1e-5), torch.tensor(1e-5)])
def test_scalars_of_other_types_are_converted(cpu_body: None, epsilon: Any) -> None:
    x = torch.randn(4, 64)
    expected = ops.rms_norm(x, torch.ones(64), float(epsilon), backend="reference")
    torch.testing.assert_close(norm(x, epsilon), expected)
    y, _ = ops.add_layer_norm(x, x, *torch.ones(2, 64), epsilon, backend="native")
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(2 * x, (64,), *torch.ones(2, 64), float(epsilon)))


def test_scalars_of_wrong_types_are_refused(cpu_body: None) -> None:
    with pytest.raises(RuntimeError, match=r"int.*'window'.*float"):
        ops.attention_softmax(torch.randn(4, 4), window=2.0, backend="native")
    sample = torch.tensor([7])
    x = torch.randn(6, 1, 64)
    shifted = ops.bias_dropout_add(x, None, None, 0.5, 3, sample, torch.tensor(5), backend="native")
    assert torch.equal(shifted, ops.bias_dropout_add(x, None, None, 0.5, 3, sample, 5, backend="reference"))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_tracers_record_the_operator(cpu_body: None) -> None:
    x, other = torch.randn(2, 4, 64)

    def function(z: Tensor) -> Tensor:
        return norm(z)

    for graph in (
        torch.jit.trace(function, (x,), check_trace=False),
        make_fx(function)(x),
        make_fx(function, pre_dispatch=True)(x),
    ):
        assert "rms_norm" in str(graph.graph)
        assert torch.equal(graph(other), norm(other))


def test_batches_of_gradients(cpu_body: None) -> None:
    """torch.autograd's own vmap, of which torch.func knows nothing."""
    x = torch.randn(3, 16, requires_grad=True)
    y, grads = norm(x), torch.randn(5, 3, 16)
    (batched,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(batched, torch.stack(single))


def test_modes_of_functions_see_the_operator(cpu_body: None) -> None:
    with Functions() as seen:
        norm(torch.randn(4, 64))
    assert any("megatron_core.rms_norm" in name for name in seen.names)


def test_tensors_that_are_not_their_memory(cpu_body: None) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    assert torch.equal(norm(torch._neg_view(x)), norm(-x))
    (dx,) = torch.autograd.grad(norm(x), x, torch._efficientzerotensor((4, 64)))
    assert torch.equal(dx, torch.zeros(4, 64))


def test_selective_recomputation_keeps_what_its_policy_says(cpu_body: None) -> None:
    """A policy that keeps the operator's output: backward does not compute it again."""
    operators = [torch.ops.megatron_core.rms_norm.default]
    x = torch.randn(4, 64, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, operators)
    y = checkpoint(lambda z: norm(z * 2) * 3, x, use_reentrant=False, context_fn=contexts)
    with Seen() as seen:
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert "megatron_core::rms_norm" not in seen.names
    torch.testing.assert_close(dx, torch.autograd.grad((norm(x * 2) * 3).sum(), x)[0])


def test_compiled_graphs_hold_the_operator(cpu_body: None) -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    x = torch.randn(4, 64)
    assert torch.equal(torch.compile(norm, fullgraph=True, backend=backend)(x), norm(x))
    assert "megatron_core.rms_norm" in graphs[0]


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

    with Seen() if dispatched else nullcontext():
        ours = grads("native")
    for own, plain in zip(ours, grads("reference"), strict=True):
        if plain is None:
            assert own is None
        else:
            torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("dispatched", [False, True])
def test_second_derivatives_are_refused_with_the_way_out(cpu_body: None, dispatched: bool) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    with (
        Seen() if dispatched else nullcontext(),
        pytest.raises(NotImplementedError, match=r"rms_norm_backward has no backward.*backend='reference'"),
    ):
        y = norm(x)
        assert goes_direct(y) != dispatched
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_derivatives_are_refused_with_the_way_out(cpu_body: None) -> None:
    x, tangent = torch.randn(4, 64), torch.randn(4, 64)
    weight = torch.ones(64)
    with pytest.raises(NotImplementedError, match=r"rms_norm has no forward-mode derivative; take backend='reference'"):
        torch.func.jvp(lambda x: ops.rms_norm(x, weight, backend="native"), (x,), (tangent,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises(NotImplementedError, match="rms_norm has no forward-mode derivative"):
            ops.rms_norm(dual, weight, backend="native")
        assert torch.equal(ops.rms_norm(x, weight, backend="native"), norm(x))
        slope = forward_ad.unpack_dual(ops.rms_norm(dual, weight, backend="reference")).tangent
    _, expected = torch.func.jvp(lambda x: ops.rms_norm(x, weight, backend="reference"), (x,), (tangent,))
    torch.testing.assert_close(slope, expected)
    assert slope.norm() > 0
