"""Deferred weight gradients are correct, and only they are deferred."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_core.features.pipeline_schedules.weight_grad import WeightGradQueue
from megatron_core.parallel.groups import Grid, ParallelGroups
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.tensor_parallel.linear_comm import LinearComm
from megatron_core.transformer.recompute import recomputed
from megatron_core.verify.ranks import run_ranks, this_world


def gradients(*, split: bool, main_grad: bool, recompute: bool = False) -> tuple[torch.Tensor, ...]:
    """Gradients of x, weight (used twice) and bias, and those of weight and bias before the queue has run."""
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(4, 4).double()), nn.Parameter(torch.randn(4).double())
    if main_grad:
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(3, 2, 4).double().requires_grad_()
    queue = WeightGradQueue()

    def model(x: torch.Tensor) -> torch.Tensor:
        return parallel_linear(torch.tanh(parallel_linear(x, weight, bias)), weight, None)

    with queue.attached([weight, bias]):
        y = (recomputed(model) if recompute else model)(x)
        if split:
            with queue.collecting(0, 0):
                y.square().sum().backward()
        else:
            y.square().sum().backward()
        early = (weight.main_grad if main_grad else weight.grad, bias.grad)
        early = tuple(None if grad is None else grad.clone() for grad in early)
        if split:
            queue.run(0, 0)
    return x.grad, weight.main_grad if main_grad else weight.grad, bias.grad, *early


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_split_backward_gives_the_same_gradients(main_grad: bool, recompute: bool) -> None:  # C33
    whole = gradients(split=False, main_grad=main_grad, recompute=recompute)
    split = gradients(split=True, main_grad=main_grad, recompute=recompute)
    for a, b in zip(whole[:3], split[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)
    assert whole[1].abs().min() > 1e-3
    early_weight, early_bias = split[3:]
    assert early_weight is None or not early_weight.any(), "the weight's gradient was not put off"
    assert torch.equal(early_bias, split[2]), "the bias's gradient need not wait"


def test_put_off_gradients_do_not_record_a_graph() -> None:
    _, grad, *_ = gradients(split=True, main_grad=True)
    assert not grad.requires_grad


def test_parameters_forget_the_queue() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="stop"), WeightGradQueue().attached([weight]):
        assert weight.grad_queue is not None
        raise ValueError("stop")
    assert not hasattr(weight, "grad_queue")


def test_micro_batches_are_kept_apart() -> None:
    queue, done = WeightGradQueue(), []
    for micro in (0, 1):
        with queue.collecting(3, micro):
            assert queue.takes(nn.Parameter(), lambda micro=micro: done.append(micro))
    assert not queue.takes(nn.Parameter(), done.clear)
    queue.run(3, 1)
    assert done == [1]
    queue.run(3, 0)
    assert done == [1, 0]
    with pytest.raises(KeyError):
        queue.run(3, 0)


def _sequence_parallel() -> float:
    """The sequence is gathered again for the deferred gradient; returns the error relative to the whole."""
    groups = ParallelGroups(Grid(tp=2), this_world().rank)
    comm = LinearComm(groups.group("tp"), gather_sequence=True)
    torch.manual_seed(0)
    full, weight = torch.randn(4, 1, 3).double(), nn.Parameter(torch.randn(2, 3).double())
    mine = full.chunk(2)[groups.index("tp")].clone().requires_grad_()
    queue = WeightGradQueue()
    with queue.attached([weight]), queue.collecting(0, 0):
        parallel_linear(mine, weight, None, comm).square().sum().backward()
    assert weight.grad is None
    queue.run(0, 0)
    reference = nn.Parameter(weight.detach().clone())
    nn.functional.linear(full, reference).square().sum().backward()
    return (weight.grad - reference.grad).abs().max().item()


def test_sequence_parallel() -> None:
    assert max(run_ranks(2, _sequence_parallel)) < 1e-13
