"""Native operations as torch operators, for torch.compile, torch.func, dispatch modes and the profiler."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.bench_ops import as_tuple
from benchmarks.op_cases import CASES
from megatron_core import ops
from megatron_core.ops.attention import causal_attention
from megatron_core.ops.operator import operator
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy
from tests.runs import tiny_run

pytestmark = pytest.mark.usefixtures("cpu_kernels")


class Seen(TorchDispatchMode):
    """Remembers the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def norm(x: Tensor, epsilon: Any = 1e-5) -> Tensor:
    return ops.rms_norm(x, torch.ones(x.shape[-1]), epsilon, backend="native")


def losses(logits: Tensor, backend: ops.Backend = "native") -> Tensor:
    """A vocabulary of 37 with padding."""
    target = torch.arange(6) % 37
    return vocab_parallel_cross_entropy(logits, target, 0.1, LocalGroup(), vocab_size=37, backend=backend)


@pytest.mark.parametrize("epsilon", [0, 1, np.float32(1e-5), torch.tensor(1e-5)])
def test_scalars_of_other_types_are_converted(epsilon: Any) -> None:
    x = torch.randn(4, 64)
    expected = ops.rms_norm(x, torch.ones(64), float(epsilon), backend="reference")
    torch.testing.assert_close(norm(x, epsilon), expected)
    with torch.inference_mode():
        torch.testing.assert_close(norm(x, epsilon), expected)


def test_plain_tensors_call_the_function_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, forward and backward, without the dispatcher; a dispatch mode sees the operators."""

    def gradients() -> tuple[Tensor, ...]:
        y = ops.layer_norm(x, weight, bias, backend="native")
        return y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))

    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((4, 64), (64,), (64,)))
    with Seen() as seen:
        expected = gradients()
    assert {"megatron_core::layer_norm", "megatron_core::layer_norm_backward"} <= seen.names
    for each in ("_layer_norm", "_layer_norm_backward"):
        monkeypatch.setattr(getattr(ops.norm, each), "_operator", None)
    assert all(map(torch.equal, gradients(), expected))


def test_modes_meta_tensors_and_the_profiler_use_the_dispatcher() -> None:
    query = torch.randn(5, 1, 2, 8, requires_grad=True)
    expected = causal_attention(query, query, query)
    with torch.device("meta"):  # new tensors of the implementation are on the CPU nevertheless
        assert torch.equal(causal_attention(query, query, query), expected)
    on_meta = query.detach().to("meta")
    assert causal_attention(on_meta, on_meta, on_meta).is_meta
    with profile(activities=[ProfilerActivity.CPU]) as found:
        causal_attention(query, query, query).sum().backward()
    names = {event.key for event in found.key_averages()}
    assert {"megatron_core::causal_attention", "megatron_core::causal_attention_backward"} <= names


def test_default_values_are_refused() -> None:
    def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
        return factor * x

    with pytest.raises(TypeError, match="operator scaled_for_test has default values"):
        operator("scaled_for_test")(scaled)


def test_inference_mode_calls_the_function_itself() -> None:
    """Without the dispatcher, with the same result."""
    x = torch.randn(4, 64)
    expected = ops.rms_norm(x, torch.ones(64), backend="reference")
    with torch.inference_mode(), Seen() as seen:
        found = norm(x)
    assert "megatron_core::rms_norm" not in seen.names
    torch.testing.assert_close(found, expected)
    with torch.no_grad(), Seen() as seen:
        norm(x)
    assert "megatron_core::rms_norm" in seen.names


def test_scalars_of_wrong_types_are_refused() -> None:
    with pytest.raises(TypeError, match="float"):
        ops.attention_softmax(torch.randn(4, 4), window=2.0, backend="native")
    with Seen(), pytest.raises(RuntimeError, match=r"int.*'window'.*float"):
        ops.attention_softmax(torch.randn(4, 4), window=2.0, backend="native")


def test_graphs_hold_the_operator() -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    x, other = torch.randn(2, 4, 64)
    assert torch.equal(torch.compile(norm, fullgraph=True, backend=backend)(x), norm(x))
    traced = make_fx(lambda x: norm(x))(x)
    assert torch.equal(traced(other), norm(other))
    assert all("megatron_core.rms_norm" in graph for graph in (*graphs, str(traced.graph)))


def test_tensors_that_are_not_their_memory() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    assert torch.equal(norm(torch._neg_view(x)), norm(-x))
    (dx,) = torch.autograd.grad(norm(x), x, torch._efficientzerotensor((4, 64)))
    assert torch.equal(dx, torch.zeros(4, 64))


def test_selective_recomputation_keeps_what_its_policy_says() -> None:
    """A policy that saves the operator's output: backward does not recompute it."""
    operators = [torch.ops.megatron_core.rms_norm.default]
    x = torch.randn(4, 64, requires_grad=True)
    contexts = partial(create_selective_checkpoint_contexts, operators)
    y = checkpoint(lambda z: norm(z * 2) * 3, x, use_reentrant=False, context_fn=contexts)
    with Seen() as seen:
        (dx,) = torch.autograd.grad(y.sum(), x)
    assert "megatron_core::rms_norm_backward" in seen.names and "megatron_core::rms_norm" not in seen.names
    torch.testing.assert_close(dx, torch.autograd.grad((norm(x * 2) * 3).sum(), x)[0])


def test_the_profiler_names_the_operator() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        norm(torch.randn(4, 64, requires_grad=True))
    assert "megatron_core::rms_norm" in {event.key for event in profiled.key_averages()}


def test_fake_tensors_are_not_read() -> None:
    with FakeTensorMode() as mode:
        within = norm(torch.randn(4, 64, requires_grad=True))
    after = ops.rms_norm(mode.from_tensor(torch.randn(2, 64)), mode.from_tensor(torch.ones(64)), backend="native")
    assert (within.shape, after.shape) == ((4, 64), (2, 64))
    assert within.grad_fn is not None


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    with torch.no_grad():
        assert norm(x).grad_fn is None
    assert norm(x.detach()).grad_fn is None
    assert norm(x).grad_fn is not None


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", sorted(CASES))
def test_torch_func_gives_the_gradients_of_autograd(name: str) -> None:
    """For one example and for a batch."""
    torch.manual_seed(0)
    tensors = CASES[name].inputs(8, 256, torch.float32)
    wanted = tuple(i for i, tensor in enumerate(tensors) if tensor.requires_grad)

    def total(*inputs: Tensor) -> Tensor:
        return sum(y.square().sum() for y in as_tuple(CASES[name].function(*inputs, backend="native")))

    expected = torch.autograd.grad(total(*tensors), [tensors[i] for i in wanted])
    plain = [tensor.detach() for tensor in tensors]
    gradient = torch.func.grad(total, wanted)
    for mine, right in zip(gradient(*plain), expected, strict=True):
        assert torch.equal(mine, right)
    first, rest = torch.stack([plain[0], 2 * plain[0]]), plain[1:]
    batched = torch.func.vmap(gradient, (0, *[None] * len(rest)))(first, *rest)
    single = [gradient(example, *rest) for example in first]
    for mine, right in zip(batched, map(torch.stack, zip(*single, strict=True)), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-6)


def test_batches_of_gradients() -> None:
    """torch.autograd's own vmap, which does not use torch.func."""
    x = torch.randn(3, 16, requires_grad=True)
    y, grads = norm(x), torch.randn(5, 3, 16)
    (batched,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(batched, torch.stack(single))


OTHER = r"take kernel_backend='reference'|gather the logits and take torch.nn.functional.cross_entropy"


@pytest.mark.parametrize("name", sorted(set(CASES) - {"rope"}))
def test_second_derivatives_are_refused_with_the_way_out(name: str) -> None:  # C52
    tensors = CASES[name].inputs(8, 64, torch.float32)
    leaf = next(tensor for tensor in tensors if tensor.requires_grad)
    outputs = as_tuple(CASES[name].function(*tensors, backend="native"))
    (slope,) = torch.autograd.grad(sum(y.square().sum() for y in outputs), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"has no (backward|second derivative); .*({OTHER})"):
        torch.autograd.grad(slope.square().sum(), leaf)


@pytest.mark.parametrize("function", [norm, losses, partial(losses, backend="reference")])
def test_derivatives_by_torch_func_are_refused_with_the_way_out(function: Any) -> None:  # C52
    x = torch.randn(6, 40)
    with pytest.raises(NotImplementedError, match=f"no forward-mode derivative; ({OTHER})"):
        torch.func.jvp(function, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"no forward-mode derivative; ({OTHER})"):
        function(forward_ad.make_dual(x, x))
    with pytest.raises(NotImplementedError, match=f"has no (backward|second derivative); .*({OTHER})"):
        torch.func.jacrev(torch.func.grad(lambda x: function(x).sum()))(x)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "name", ["rms_norm", "bias_dropout_add", "bias_swiglu", "cross_entropy", "masked_softmax", "rope"]
)
def test_compiled_with_dynamic_shapes(name: str) -> None:
    """One graph for several shapes, forward and backward."""
    torch.compiler.reset()
    function = partial(CASES[name].function, backend="native")
    compiled = torch.compile(function, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows, columns in ((8, 64), (12, 96)):
        found = []
        for each in (function, compiled):
            torch.manual_seed(0)
            tensors = CASES[name].inputs(rows, columns, torch.float32)
            outputs = as_tuple(each(*tensors))
            wanted = [tensor for tensor in tensors if tensor.requires_grad]
            found.append([*outputs, *torch.autograd.grad(outputs, wanted, [torch.ones_like(y) for y in outputs])])
        assert all(map(torch.equal, *found))


@pytest.mark.drawn(0)
def test_a_compiled_model_with_dynamic_shapes() -> None:
    torch.compiler.reset()
    (model,) = tiny_run(kernel_backend="native", num_layers=1).stages.values()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager")
    for length in (8, 12):
        tokens = torch.arange(2 * length).reshape(2, length) % 16
        found = compiled(tokens, tokens)
        torch.testing.assert_close(found, model(tokens, tokens))
        found.sum().backward()
    assert all(p.grad is not None or p.main_grad.any() for p in model.parameters())
