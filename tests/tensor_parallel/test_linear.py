"""Column and row parallel layers against ``nn.Linear`` in float64: outputs and every gradient."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core import parallel_state
from megatron_core.errors import LayoutError
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.tensor_parallel import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.verify.ranks import run_ranks

S, B, IN, OUT = 8, 2, 12, 16
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _random(*shape: int, seed: int) -> Tensor:
    """Exactly representable in float32, because initial weights are drawn in it."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


@dataclass
class Baseline:
    """One process's layer, its input, the output's gradient, and all results."""

    x: Tensor
    grad_y: Tensor
    layer: nn.Linear
    y: Tensor

    @classmethod
    def compute(cls) -> Baseline:
        layer = nn.Linear(IN, OUT, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(_random(OUT, IN, seed=1))
            layer.bias.copy_(_random(OUT, seed=2))
        x = _random(S, B, IN, seed=3).requires_grad_()
        y, grad_y = layer(x), _random(S, B, OUT, seed=4)
        y.backward(grad_y)
        return cls(x, grad_y, layer, y.detach())


def _config(**settings: int) -> ModelParallelConfig:
    return ModelParallelConfig(params_dtype=torch.float64, **settings)


def _set_bias(layer: nn.Module, bias: Tensor) -> None:
    with torch.no_grad():
        layer.bias.copy_(bias)


class Parts:
    """The part of a tensor on a rank of ``group``."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def rows(self, x: Tensor) -> Tensor:
        return x.chunk(self.group.size(), 0)[self.group.rank()].contiguous()

    def columns(self, x: Tensor) -> Tensor:
        return x.chunk(self.group.size(), -1)[self.group.rank()]

    def leaf(self, x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_()


def _column(
    group: Group, baseline: Baseline, *, sequence_parallel: bool, gather: bool, skip_bias: bool, chunks: int
) -> None:
    part = Parts(group)
    layer = ColumnParallelLinear(
        IN,
        OUT,
        config=_config(sequence_parallel=sequence_parallel, tp_comm_overlap_chunks=chunks),
        init_method=lambda full: full.copy_(baseline.layer.weight),
        gather_output=gather,
        skip_bias_add=skip_bias,
        tp_group=group,
    )
    _set_bias(layer, part.rows(baseline.layer.bias))
    x = part.leaf(part.rows(baseline.x) if sequence_parallel else baseline.x)
    y, bias = layer(x)
    assert (bias is layer.bias) if skip_bias else (bias is None)
    y = y + bias if skip_bias and not gather else y
    expected = baseline.y - baseline.layer.bias if skip_bias and gather else baseline.y
    torch.testing.assert_close(y, expected if gather else part.columns(expected), **EXACT)
    y.backward(baseline.grad_y if gather else part.columns(baseline.grad_y))
    torch.testing.assert_close(layer.weight.grad, part.rows(baseline.layer.weight.grad), **EXACT)
    if not (skip_bias and gather):
        torch.testing.assert_close(layer.bias.grad, part.rows(baseline.layer.bias.grad), **EXACT)
    torch.testing.assert_close(x.grad, part.rows(baseline.x.grad) if sequence_parallel else baseline.x.grad, **EXACT)


def _row(
    group: Group, baseline: Baseline, *, sequence_parallel: bool, parallel_input: bool, skip_bias: bool, chunks: int
) -> None:
    part = Parts(group)
    layer = RowParallelLinear(
        IN,
        OUT,
        config=_config(sequence_parallel=sequence_parallel, tp_comm_overlap_chunks=chunks),
        init_method=lambda full: full.copy_(baseline.layer.weight),
        input_is_parallel=parallel_input,
        skip_bias_add=skip_bias,
        tp_group=group,
    )
    _set_bias(layer, baseline.layer.bias)
    x = part.leaf(part.columns(baseline.x) if parallel_input else baseline.x)
    y, bias = layer(x)
    assert (bias is layer.bias) if skip_bias else (bias is None)
    y = y + bias if skip_bias else y
    torch.testing.assert_close(y, part.rows(baseline.y) if sequence_parallel else baseline.y, **EXACT)
    y.backward(part.rows(baseline.grad_y) if sequence_parallel else baseline.grad_y)
    torch.testing.assert_close(layer.weight.grad, part.columns(baseline.layer.weight.grad), **EXACT)
    torch.testing.assert_close(x.grad, part.columns(baseline.x.grad) if parallel_input else baseline.x.grad, **EXACT)
    if sequence_parallel:  # C17: each rank's bias gradient is a part, to be summed
        assert layer.bias.shard_spec.partial_axes == ("tp",)
        all_reduce_(layer.bias.grad, group)
    torch.testing.assert_close(layer.bias.grad, baseline.layer.bias.grad, **EXACT)


def _check_layers(world_size: int) -> None:
    baseline = Baseline.compute()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    parallel_state.initialize_model_parallel(world_size)
    group = parallel_state.get_tensor_model_parallel_group()
    for tp_group, chunks in product((group, pairs[dist.get_rank() % 2]), (1, 3)):  # C50: not the default group
        for sequence_parallel, skip_bias in product((False, True), repeat=2):
            given = {"sequence_parallel": sequence_parallel, "skip_bias": skip_bias, "chunks": chunks}
            for gather in (False, True):
                _column(tp_group, baseline, gather=gather, **given)
            _row(tp_group, baseline, parallel_input=True, **given)
        _row(tp_group, baseline, sequence_parallel=False, parallel_input=False, skip_bias=False, chunks=chunks)
    assert ColumnParallelLinear(IN, OUT).weight.shape == (OUT // world_size, IN), "the default group is the current one"


def test_layers_compute_what_one_process_computes() -> None:
    """Tensor-parallel sizes 4 and 2, the latter in explicit groups of non-adjacent ranks."""
    run_ranks(4, _check_layers, 4)


def _backward_twice(layer: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """Two micro-batches; the input gradients."""
    grads = []
    for seed in (5, 6):
        x = _random(*shape, seed=seed).requires_grad_()
        y, _ = layer(x)
        y.backward(_random(*y.shape, seed=seed + 10))
        grads.append(x.grad)
    return grads


def _check_gradients_of_weights() -> None:
    group = dist.group.WORLD
    for sequence_parallel in (False, True):
        made = {}
        for name, overlap, with_main_grad in (("plain", True, False), ("main", True, True), ("serial", False, True)):
            config = _config(sequence_parallel=sequence_parallel, tp_comm_overlap=overlap)
            torch.manual_seed(0)
            layer = ColumnParallelLinear(IN, OUT, config=config, tp_group=group)
            if with_main_grad:
                layer.weight.main_grad = torch.zeros_like(layer.weight)
            made[name] = (layer, _backward_twice(layer, (S, B, IN)))
        (plain, plain_x), (main, main_x), (serial, serial_x) = made.values()
        # C2 C35: two backwards add up, in main_grad as in autograd's own sum
        torch.testing.assert_close(main.weight.main_grad, plain.weight.grad, **EXACT)
        assert main.weight.grad is None and main.bias.grad is not None
        torch.testing.assert_close(main_x, plain_x, **EXACT)
        # C12: overlap on and off are bitwise equal
        assert torch.equal(main.weight.main_grad, serial.weight.main_grad)
        assert torch.equal(main.bias.grad, serial.bias.grad)
        assert all(torch.equal(a, b) for a, b in zip(main_x, serial_x, strict=True))
        _check_frozen(plain, plain_x)


def _check_frozen(layer: nn.Module, input_grads: list[Tensor]) -> None:
    """A frozen weight gets no gradient, and does not change its input's."""
    layer.weight.requires_grad_(False)
    layer.weight.grad, layer.weight.main_grad = None, torch.zeros_like(layer.weight)
    for again, before in zip(_backward_twice(layer, (S, B, IN)), input_grads, strict=True):
        assert torch.equal(again, before)
    assert layer.weight.grad is None and not layer.weight.main_grad.any()


def test_weight_gradients_add_up_with_and_without_overlap() -> None:
    run_ranks(2, _check_gradients_of_weights)


def test_main_grad_may_be_wider_than_the_weight() -> None:
    """bfloat16 weights accumulate in float32: 1 + 1/512 is 1 in bfloat16."""
    weight = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(1, 1)
    for value in (1.0, 1 / 512):
        y = parallel_linear(torch.full((1, 1, 1), value, dtype=torch.bfloat16), weight, None)
        y.backward(torch.ones_like(y))
    assert weight.main_grad.item() == 1 + 1 / 512


def test_input_without_gradient() -> None:
    """The first layer of a model: only the weight needs a gradient."""
    layer = ColumnParallelLinear(IN, OUT, tp_group=LocalGroup())
    y, _ = layer(torch.ones(S, B, IN))
    y.sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((OUT, IN), float(S * B)))


def test_weight_of_another_layer() -> None:
    """A tied output layer has no weight of its own."""
    layer = ColumnParallelLinear(IN, OUT, bias=False, skip_weight_param_allocation=True, tp_group=LocalGroup())
    with pytest.raises(LayoutError, match="weight="):
        layer(torch.ones(S, B, IN))
    weight = nn.Parameter(torch.randn(OUT, IN))
    y, bias = layer(torch.ones(S, B, IN), weight=weight)
    torch.testing.assert_close(y, weight.sum(1).expand(S, B, OUT))
    assert bias is None and layer.weight is None


class TwoRanks(LocalGroup):
    """A partial group, sufficient for errors before communication."""

    def size(self) -> int:
        """The size 2."""
        return 2


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(LayoutError, match="output_size=5 cannot be split over tensor_model_parallel_size=2"):
        ColumnParallelLinear(4, 5, tp_group=TwoRanks())
    with pytest.raises(LayoutError, match="input_size=5 cannot be split"):
        RowParallelLinear(5, 4, tp_group=TwoRanks())
    with pytest.raises(LayoutError, match="input_is_parallel=True"):
        RowParallelLinear(4, 4, config=_config(sequence_parallel=True), input_is_parallel=False, tp_group=TwoRanks())
