"""Updates of whole matrices by one rank each: the bits of one process, equal work, and only the bytes needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import DataParallel, DataParallelSettings
from megatron_core.data_parallel.settings import in_order
from megatron_core.features.matrix_optimizers import plan as matrix_plan
from megatron_core.features.matrix_optimizers.whole_shards import whole_matrices
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.sharding import (
    ShardSpec,
    allocate,
    replicated,
    spec_of,
    split,
    split_fused,
    split_over,
    split_qkv,
)
from megatron_core.reports.meter import METER
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted

STEPS, WIDTH = 3, 12
MUON: dict[str, Any] = {"optimizer": "muon", "clip_grad": 0.0, "weight_decay": 0.1, "muon_nesterov": True}


@dataclass(frozen=True)
class Layout:
    """A grid and the way in which its ranks shard the optimizer."""

    grid: Grid
    zero: int = 0
    whole: bool = False
    """Whether shards contain whole matrices."""
    instances: int = 1


ONE = Layout(Grid())
LAYOUTS = {
    2: [
        Layout(Grid(tp=2)),
        Layout(Grid(dp=2)),
        Layout(Grid(dp=2), 1, whole=True),
        Layout(Grid(dp=2), 1),
        Layout(Grid(dp=2), 3),
        Layout(Grid(dp=2, ep=2), 2),
        Layout(Grid(cp=2), 1),
    ],
    4: [
        Layout(Grid(tp=4)),
        Layout(Grid(tp=2, dp=2), 1, whole=True),
        Layout(Grid(tp=2, dp=2), 3),
        Layout(Grid(tp=2, dp=2, ep=2, etp=1), 1),
        Layout(Grid(tp=2, dp=2, ep=2, etp=2), 2),
        Layout(Grid(tp=2, dp=2, order="dp-tp-ep-cp-pp"), 1),
        Layout(Grid(dp=4), 1, instances=2),
    ],
}


class Layer(nn.Module):
    """Each kind of matrix: fused, interleaved by group, shared by ranks, replicated, stacked over two axes."""

    def __init__(self, groups: ParallelGroups, dtype: torch.dtype) -> None:
        super().__init__()
        tp, ep, etp = ((groups.index(axis), groups.size(axis)) for axis in ("tp", "ep", "etp"))
        experts, second = (4, 2 * 8, WIDTH), (4, WIDTH, 8)
        inner = split_fused(experts, (8, 8), *etp, dim=1, axis="etp")
        specs: dict[str, ShardSpec] = {
            "qkv": split_qkv((8 * 4, WIDTH), 4, 2, 4, *tp),
            "gated_qkv": split_qkv((4 * 4 * 3, WIDTH), 4, 4, 3, *tp),
            "proj": split((WIDTH, 16), 1, *tp),
            "fc1": split_fused((48, WIDTH), (24, 24), *tp),
            "fc2": split((WIDTH, 24), 1, *tp),
            "router": replicated((4, WIDTH), tp[0]),
            "experts_fc1": split_over(split(experts, 0, *ep, axis="ep"), inner, replica_axes=("edp",)),
            "experts_fc2": split_over(
                split(second, 0, *ep, axis="ep"), split(second, 2, *etp, axis="etp"), replica_axes=("edp",)
            ),
            "norm": replicated((WIDTH,), tp[0]),
        }
        for number, (name, spec) in enumerate(specs.items()):
            weight = allocate(spec, dtype, "cpu")
            spec.localise(numbers(spec.global_shape, number), weight.data)
            self.register_parameter(name, weight)


def numbers(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def local_grad(spec: ShardSpec, whole: Tensor, like: Tensor, *, counts: bool) -> Tensor:
    """A rank's gradient, so that exactly one of the terms of each sum over ranks is not zero."""
    grad = torch.zeros_like(like)
    for part in spec.parts:
        if counts and (part.owned or not part.shared_over):
            grad[part.local.index] = whole[part.whole.index].to(grad)
    return grad


def trained(layout: Layout, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[dict[str, Tensor], Any]:
    """This rank's own parts of weights after some steps, NaN elsewhere; the plan of its updates."""
    groups = ParallelGroups(layout.grid, _rank(), instances=layout.instances)
    layer = Layer(groups, dtype)
    data = DataParallel(
        {0: layer},
        groups,
        DataParallelSettings(
            zero_stage=layout.zero, bucket_size=900, rule_of=whole_matrices if layout.whole else in_order
        ),
    )
    config = OptimizerConfig(**(MUON | settings))
    optimizer = Optimizer(data, config, groups, LossScale(1.0))
    METER.start(groups, torch.device("cpu"))
    for step in range(STEPS):
        data.zero_grad()
        for bucket in data.buckets:
            bucket.open_grads()
        for number, weight in enumerate(layer.parameters()):
            spec = spec_of(weight)
            counts = all(groups.index(axis) == 0 for axis in spec.replica_axes)
            whole = numbers(spec.global_shape, 100 + 10 * step + number)
            grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
            grad.copy_(local_grad(spec, whole, grad, counts=counts))
        data.finish_grad_sync()
        METER.take()
        optimizer.step(0.02, 1.0)
        sent = sum(traffic.bytes for traffic in METER.take().traffic.values())
        data.start_param_sync()
    METER.stop()
    found = {}
    with data.gathered(layer.parameters()):
        for name, weight in layer.named_parameters():
            found[name] = torch.full(spec_of(weight).global_shape, torch.nan, dtype=dtype)
            for part in spec_of(weight).parts:
                found[name][part.whole.index] = weight.detach()[part.local.index]
    rounds = optimizer._joint.rounds
    return found, (sum(task.cost for now in rounds for task in now.tasks), sent)


def _rank() -> int:
    return torch.distributed.get_rank()


def all_trained(layouts: list[Layout], cases: list[tuple[torch.dtype, dict[str, Any]]]) -> list[list[Any]]:
    matrix_plan.STACK = 200  # one expert, or two
    return [[trained(layout, *case) for layout in layouts] for case in cases]


CASES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float64, {}),
    (torch.float32, {"muon_fp32_matmul_prec": "highest", "muon_split_heads": True, "muon_split_gate_up": True}),
    (torch.float32, {"muon_split_qkv": False}),
    (torch.float64, {"optimizer": "soap", "soap_split_gate_up": True, "soap_max_precondition_dim": 20}),
    (torch.float32, {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon"}),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_updates_have_the_bits_of_one_process(ranks: int) -> None:
    """In float64, in float32, and with products in bfloat16."""
    expected = run_ranks(1, all_trained, [ONE], CASES)[0]
    found = run_ranks(ranks, all_trained, LAYOUTS[ranks], CASES)
    for case, (((alone, (work, silent)),), *by_rank) in enumerate(zip(expected, *found, strict=True)):
        assert silent == 0.0
        for number, layout in enumerate(LAYOUTS[ranks]):
            each = [results[number] for results in by_rank]
            shares = [share for _, (share, _) in each]
            assert sum(shares) == work, "every matrix has one owner in all"
            assert max(shares) < 1.35 * work / ranks, (layout, shares)
            held = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in alone.items()}
            for weights, _ in each:
                for name, weight in weights.items():
                    own = ~weight.isnan()
                    held[name] |= own
                    assert torch.equal(weight[own], alone[name][own]), (case, layout, name)
            assert all(each.all() for each in held.values())


def test_only_the_parts_of_other_ranks_are_sent() -> None:
    """Elements sent in a step by both ranks together, each of 8 bytes."""
    layouts = [Layout(Grid(dp=2), 1, whole=True), Layout(Grid(dp=2)), Layout(Grid(tp=2))]
    by_rank = run_ranks(2, all_trained, layouts, CASES[:1])
    held_whole, copied, split_in_two = (
        sum(results[0][number][1][1] for results in by_rank) / 8 for number in range(len(layouts))
    )
    matrices = {name: weight.numel() for name, weight in by_rank[0][0][0][0].items() if weight.dim() > 1}
    assert held_whole == 0
    assert copied == sum(matrices.values()), "each result to the other rank"
    # Half of each matrix to its owner and half of each result back, or the whole result of a replicated matrix.
    assert split_in_two == sum(matrices.values())


WRONG = {
    "the shard of the other copy of a hybrid-sharded model": (
        "features.matrix_optimizers.plan:MatrixStage._holders",
        ".index(rank) % shards",
        ".index(rank) // shards",
        4,
        Layout(Grid(dp=4), 1, instances=2),
    ),
    "no owner of the last expert": (
        "features.matrix_optimizers.plan:tasks_of",
        "range(0, shape[0], count)",
        "range(0, shape[0] - (len(shape) > 2), count)",
        2,
        Layout(Grid(dp=2, ep=2), 2),
    ),
    "parts one element late": (
        "features.matrix_optimizers.updates:MatrixAlgorithm._receive",
        "received[offset : offset + target.numel()]",
        "received.roll(1)[offset : offset + target.numel()]",
        2,
        Layout(Grid(tp=2)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parts_change_bits(name: str) -> None:
    target, old, new, ranks, layout = WRONG[name]
    alone = run_ranks(1, all_trained, [ONE], CASES[:1])[0][0][0][0]
    with planted(target, old, new):
        found = run_ranks(ranks, all_trained, [layout], CASES[:1])
    weights = [results[0][0][0] for results in found]
    assert any(not torch.equal(w[~w.isnan()], alone[name][~w.isnan()]) for each in weights for name, w in each.items())
