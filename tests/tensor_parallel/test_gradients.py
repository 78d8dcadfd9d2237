"""Every custom backward against finite differences, for inputs with any number of dims and any strides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from megatron_core import parallel_state
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import ColumnParallelLinear, vocab_parallel_cross_entropy
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.tensor_parallel.linear_comm import LinearComm
from megatron_core.verify.ranks import run_ranks

SHAPES = [(3,), (2, 3), (2, 3, 2), (2, 1, 3, 2)]  # without the channels
STEP = 1e-6
Product = Callable[[Tensor, Tensor], Tensor]


def _random(*shape: int, seed: int, strided: bool = False) -> Tensor:
    """The same values with contiguous or other strides."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if strided:
        x = torch.stack([x, x]).movedim(0, -1)[..., 0].transpose(0, -1).contiguous().transpose(0, -1)
    return x


def _differences(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of <function(x), grad> by central differences, with an error of about 1e-9 here."""
    found = torch.zeros_like(x, memory_format=torch.contiguous_format)
    for i in range(x.numel()):
        shift = torch.zeros(x.numel(), dtype=x.dtype)
        shift[i] = STEP
        change = function(x + shift.view(x.shape)) - function(x - shift.view(x.shape))
        found.view(-1)[i] = (change * grad).sum() / (2 * STEP)
    return found


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_linear(shape: tuple[int, ...], strided: bool) -> None:  # C52 C55
    x = _random(*shape, 3, seed=1, strided=strided).requires_grad_()
    weight = _random(4, 3, seed=2, strided=strided).requires_grad_()
    bias = _random(4, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(parallel_linear, (x, weight, bias))
    y = parallel_linear(x, weight, None)
    grad = _random(*y.shape, seed=4, strided=strided)
    into_weight = _differences(lambda w: parallel_linear(x.detach(), w, None), weight.detach(), grad)
    weight.main_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    y.backward(grad)
    torch.testing.assert_close(weight.main_grad, into_weight, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_cross_entropy(shape: tuple[int, ...], strided: bool, smoothing: float) -> None:  # C52 C55
    target = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(1))

    def losses(z: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(z, target, smoothing, LocalGroup(), vocab_size=5)

    assert torch.autograd.gradcheck(losses, _random(*shape, 6, seed=2, strided=strided).requires_grad_())


def _check_split_linear() -> None:
    """Sequence in dim 0 and output features split over the ranks, against one whole product."""
    group, rank = dist.group.WORLD, dist.get_rank()
    whole_weight = _random(8, 3, seed=1)
    for shape in ((4, 3), (4, 2, 3), (4, 1, 2, 3)):
        for strided in (False, True):
            whole = _random(*shape, seed=2, strided=strided).requires_grad_()
            grad = _random(*shape[:-1], 8, seed=3, strided=strided)
            F.linear(whole, whole_weight).backward(grad)
            for sequence in (False, True):
                comm = LinearComm(group, gather_sequence=sequence, reduce_input_grad=not sequence)
                part = whole.detach().chunk(2)[rank] if sequence else whole.detach()
                x = part.clone(memory_format=torch.preserve_format).requires_grad_()
                parallel_linear(x, whole_weight.chunk(2)[rank], None, comm).backward(grad.chunk(2, -1)[rank])
                expected = whole.grad.chunk(2)[rank] if sequence else whole.grad
                torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-12)


def test_split_linear() -> None:  # C22 C55
    run_ranks(2, _check_split_linear)


def _penalty(x: Tensor, weights: list[Tensor], hidden: Product, output: Product) -> Tensor:
    """The squared gradient of a small network's squared output, as in a gradient penalty."""
    y = output(hidden(x, weights[0]).tanh(), weights[1])
    (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return slope.square().sum()


def _check_second_derivatives() -> None:
    """A column-parallel and a row-parallel layer, also with a split sequence, against two whole products."""
    group, rank = dist.group.WORLD, dist.get_rank()
    whole = [_random(8, 3, seed=1).requires_grad_(), _random(5, 8, seed=2).requires_grad_()]
    whole_x = _random(4, 2, 3, seed=3).requires_grad_()
    _penalty(whole_x, whole, F.linear, F.linear).backward()
    for sequence in (False, True):
        column = LinearComm(group, gather_sequence=sequence, reduce_input_grad=not sequence)
        row = LinearComm(group, scatter_sequence=sequence, reduce_output=not sequence)
        weights = [whole[0].detach().chunk(2)[rank], whole[1].detach().chunk(2, 1)[rank]]
        weights = [torch.nn.Parameter(weight.clone()) for weight in weights]
        x = (whole_x.detach().chunk(2)[rank] if sequence else whole_x.detach()).clone().requires_grad_()
        layers = [partial(parallel_linear, bias=None, comm=comm) for comm in (column, row)]
        _penalty(x, weights, *layers).backward()
        expected = whole[0].grad.chunk(2)[rank], whole[1].grad.chunk(2, 1)[rank]
        for weight, grad in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight.grad, grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad, whole_x.grad.chunk(2)[rank] if sequence else whole_x.grad)


def test_second_derivatives_of_split_linear_layers() -> None:  # C55
    run_ranks(2, _check_second_derivatives)


def _check_copies() -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    layer = ColumnParallelLinear(4, 4)
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(layer)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_copy_that_would_lose_the_split_is_refused(backend: str) -> None:
    run_ranks(2, _check_copies, backend=backend)
