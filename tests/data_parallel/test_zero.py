"""ZeRO stages 2 and 3: bitwise equal where sums have the same order, and with the expected memory."""

from __future__ import annotations

import ctypes
import gc
import resource
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import skip_init

from megatron_core.data_parallel import Bucket, DataParallel, DataParallelSettings
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.grid import Grid
from megatron_core.schedules.actions import Action
from megatron_core.training.setup import Run
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.defects.plant import planted
from tests.memory import needs_proc, resident, start_anew
from tests.runs import tiny_run

SMALL = {"hidden_size": 16, "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 8}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
POISON = {"poison_buffers": True}
KEEP = {"zero3_keep_after_forward": True}

Result = tuple[list[float], list[np.ndarray]]


def _weights(run: Run) -> list[np.ndarray]:
    parameters = [p for stage in run.stages.values() for p in stage.parameters()]
    return [p.detach().to(torch.float64, copy=True).numpy() for p in run.data_parallel.reading(parameters)]


def _train(settings: dict) -> Result:
    run = tiny_run(**SMALL | settings)
    losses = [train_step(run).loss for _ in range(3)]
    return [*losses, evaluate(run, run.splits.valid, 1)], _weights(run)


def _trainings(variants: list[dict]) -> list[Result]:
    return [_train(settings) for settings in variants]


def _equal_to_the_bit(variants: list[dict]) -> None:
    for first, *others in run_ranks(2, _trainings, variants):
        for settings, (losses, weights) in zip(variants[1:], others, strict=True):
            assert losses == first[0], settings
            for found, expected in zip(weights, first[1], strict=True):
                np.testing.assert_array_equal(found, expected, err_msg=str(settings))


def test_every_stage_is_the_same_to_the_bit() -> None:
    """One micro-batch and no clipping, so that the order of sums is the same. The stages' flags are also Megatron's."""
    once = {"micro_batch_size": 4, "clip_grad": 0.0}
    words = [{"data_parallel_sharding_strategy": word} for word in ("no_shard", "optim", "optim_grads_params")]
    _equal_to_the_bit([once | each for each in [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3}, *words]])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_overlap_changes_no_bit(stage: int) -> None:  # C12 C59 C60
    sharded = {"zero_stage": stage, "bf16": stage == 3, "ddp_bucket_size": 500}
    kept = [sharded | KEEP, sharded | KEEP | OVERLAP] if stage == 3 else []
    _equal_to_the_bit([sharded, sharded | OVERLAP, *kept, sharded | OVERLAP | POISON])


def _most_whole(settings: dict) -> tuple[int, int]:
    """Maximum number of units whose weights and unreduced gradients were in memory at once."""
    run = tiny_run(**SMALL | {"num_layers": 6, "untie_embeddings_and_output_weights": True} | settings)
    most = [0, 0]

    def look(bucket: Bucket) -> None:
        for which, has in enumerate((Bucket.is_whole, Bucket.has_grads)):
            units = {b.unit for b in run.data_parallel.buckets if has.fget(b)}
            most[which] = max(most[which], len(units))

    for method in (Bucket.start_gather, Bucket.open_grads):

        def watched(bucket: Bucket, method=method) -> None:
            method(bucket)
            look(bucket)

        setattr(Bucket, method.__name__, watched)
    train_step(run)
    evaluate(run, run.splits.valid, 1)
    return most[0], most[1]


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}


@pytest.mark.parametrize(
    ("settings", "weights", "gradients"),
    [({}, 1, 1), (OVERLAP, 2, 2), (OVERLAP | FULL, 2, 2)],
    ids=["one after another", "overlap", "full recompute"],
)
def test_no_more_than_two_units_are_whole(settings: dict, weights: int, gradients: int) -> None:
    assert run_ranks(2, _most_whole, settings | {"zero_stage": 3}) == [(weights, gradients)] * 2


UNITS = {
    "num_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "vocab_size": 128,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 8,
    "micro_batch_size": 1,
    "global_batch_size": 4,
}


def _give_back_at_once() -> None:
    """Small units replace those of 32 MiB, whose memory free() returns."""
    M_MMAP_THRESHOLD = -3
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**20)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _grown_and_kept(settings: dict) -> tuple[int, int]:
    """Bytes by which the peak grew in two steps, including setup, and bytes of the shards."""
    _give_back_at_once()
    train_step(tiny_run(**SMALL))
    before = _peak()
    run = tiny_run(**UNITS | settings, zero_stage=3)
    for _ in range(2):
        train_step(run)
    shards = [t for bucket in run.data_parallel.buckets for t in (bucket.weight_shard, bucket.grad_shard)]
    state = [tensor for _, tensors in run.optimizer.tensors() for tensor in tensors.values()]
    return _peak() - before, sum(tensor.nbytes for tensor in shards + state)


@pytest.mark.parametrize(
    ("settings", "units"),
    [pytest.param({}, 5, marks=pytest.mark.whole_matrix), (OVERLAP, 8)],
    ids=["one after another", "overlap"],
)
def test_peak_memory_at_stage_3_is_the_shards_and_a_few_units(settings: dict, units: int) -> None:
    """Weights of 8 units of 12.6 MB: memory has the shards, weights and gradients of one unit (two with overlap), and
    copies of collectives; whole weights and gradients would be 16 units. Over gloo, because the size of shared memory
    depends on timing."""
    unit = 12 * 512**2 * 4
    for grown, kept in run_ranks(2, _grown_and_kept, settings, backend="gloo"):
        assert kept > 8 * unit * 4 / 2  # weight, gradient and two moments, halved
        assert grown < kept + units * unit, f"{(grown - kept) / unit:.1f} units in addition to the shards"


def _frozen_below(stage: int) -> tuple[list[np.ndarray], dict[str, int], list[int]]:
    """Gradient descent on a chain whose first layers are frozen; its third is called twice. Returns the weights,
    permanent bytes, and the frozen buckets in memory after each step."""
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2], layers[2], layers[3])
    layers[0].requires_grad_(False)
    groups = ParallelGroups(Grid(dp=2), torch.distributed.get_rank())
    data = DataParallel({0: model}, groups, DataParallelSettings(zero_stage=stage, bucket_size=1))
    whole = []
    for _ in range(3):
        data.zero_grad()
        for _ in range(2):
            model(torch.full((3, 6), 1.0 + groups.rank, dtype=torch.float64)).square().mean().backward()
        data.finish_grad_sync()
        for bucket in data.buckets:
            bucket.weight_shard.sub_(0.01 * bucket.grad_shard)
        data.start_param_sync()
        whole.append(sum(bucket.is_whole for bucket in data.frozen_buckets))
    weights = [p.detach().clone().numpy() for p in data.reading(list(model.parameters()))]
    return weights, data.resident_bytes(), whole


@cache
def _not_sharded() -> list[list[np.ndarray]]:
    return [weights for weights, *_ in run_ranks(2, _frozen_below, 0)]


def _faults_with_frozen(stage: int) -> list[str]:
    """Differences from stage 0, and memory of a rank at stage 3 in addition to its halves: three trained layers of 36
    weights and 6 biases, and the 36 weights of the frozen one, in float64, padded to 64 bytes. The 6 frozen biases are
    whole."""
    found = []
    for (weights, kept, whole), expected in zip(run_ranks(2, _frozen_below, stage), _not_sharded(), strict=True):
        off = [not np.allclose(*pair, rtol=1e-12, atol=0) for pair in zip(weights, expected, strict=True)]
        found += [f"weights of parameter {number}" for number, wrong in enumerate(off) if wrong]
        if stage == 3 and (kept["weights"], kept["gradients"]) != (8 * (4 * 24 + 3 * 8 + 6), 8 * (3 * 24 + 3 * 8)):
            found.append(f"bytes: {kept}")
        found += ["whole after a step"] * any(whole)
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_any_module_with_frozen_parameters(stage: int) -> None:
    assert _faults_with_frozen(stage) == []


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        ("data_parallel.wrapper:DataParallel.__init__", "if settings.zero_stage == 3:", "if settings.zero_stage == 4:"),
        ("data_parallel.buffer:Bucket.__init__", "* first.requires_grad, dtype", ", dtype"),
        ("data_parallel.buffer:Bucket.release_weights", "if self.splits_weights and", "if self.grads.numel() and"),
        ("data_parallel.buffer:Bucket._gather", "if self.dp_group.size() == 1:", "if not self.grads.numel():"),
    ],
    ids=["not sharded", "with gradients", "never freed", "never gathered"],
)
def test_frozen_matrices_that_are_not_handled_as_they_should_are_found(target: str, old: str, new: str) -> None:
    _not_sharded()
    with planted(target, old, new):
        try:
            assert _faults_with_frozen(3) != []
        except RankFailure as failure:  # released weights cannot be read
            assert "storage" in str(failure)


class _WithCache(nn.Module):
    """Returns tensors from the middle of its units, as a model with a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))

    def units(self) -> list[list[nn.Module]]:
        return [[layer] for layer in self.layers]

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        cache = []
        for first, second in self.layers:
            cache.append(first(x) * 1.0)
            x = x + second(cache[-1])
        return {"loss": x.square().mean(), "cache": cache}


def _late_gradients(stage: int) -> list[str]:
    """Weights whose gradients arrive after the sum of their unit."""
    model = _WithCache()
    groups = ParallelGroups(Grid(dp=2), torch.distributed.get_rank())
    data = DataParallel({0: model}, groups, DataParallelSettings(zero_stage=stage))
    forward, backward = Action(0, "F", 0), Action(0, "B", 0)
    data.begin_action(forward)
    loss = model(torch.ones(2, 4))["loss"]
    data.end_action(forward)
    data.begin_action(backward)
    loss.backward()
    data.end_action(backward)
    return [name for bucket in data.buckets if bucket.has_grads for name in bucket.names]


@pytest.mark.parametrize("stage", [2, 3])
def test_tensors_from_the_middle_of_a_unit_do_not_end_its_backward(stage: int) -> None:
    assert run_ranks(2, _late_gradients, stage) == [[], []]


def _chain(matrices: int, groups: ParallelGroups, stage: int) -> tuple[nn.Module, DataParallel]:
    """A sequence of square matrices of 4 MiB; all except the last are frozen."""
    model = nn.Sequential(*(skip_init(nn.Linear, 1024, 1024, bias=False) for _ in range(matrices)))
    for matrix in model.parameters():
        nn.init.eye_(matrix)  # random numbers would take seconds
    model[:-1].requires_grad_(False)
    return model, DataParallel({0: model}, groups, DataParallelSettings(zero_stage=stage))


def _step_of_chain(model: nn.Module, data: DataParallel) -> None:
    x = torch.ones(1, 1024, requires_grad=True)  # so that backward passes through all of them
    model(x).sum().backward()
    data.finish_grad_sync()
    data.start_param_sync()


def _frozen_memory(stage: int) -> tuple[int, int, dict[str, int]]:
    """Bytes of a chain of 32 matrices beyond the initial memory, their growth during a step, and the formula's
    prediction.

    A short chain runs first, because the pages of torch's code that it loads also count as resident.
    """
    groups = ParallelGroups(Grid(dp=2), torch.distributed.get_rank())
    _give_back_at_once()
    _step_of_chain(*_chain(2, groups, stage))
    gc.collect()
    start_anew()
    before = resident("VmRSS")
    model, data = _chain(32, groups, stage)
    start_anew()
    kept = resident("VmRSS")
    _step_of_chain(model, data)
    return kept - before, resident("VmHWM") - kept, data.resident_bytes()


@needs_proc
def test_frozen_matrices_are_sharded_at_stage_3() -> None:
    """128 MiB of weights: half of them on each rank, and only a few whole at any time."""
    matrix = 4 * 1024**2
    for kept, risen, found in run_ranks(2, _frozen_memory, 3, backend="gloo"):
        assert found["weights"] == 16 * matrix and found["gradients"] == matrix // 2
        assert kept < 24 * matrix
        assert risen < 12 * matrix, "all of them whole would be 16"
    for kept, _, found in run_ranks(2, _frozen_memory, 2, backend="gloo"):
        assert found["weights"] == 32 * matrix and kept > 31 * matrix


def test_a_unit_that_is_freed_too_early_ends_the_run() -> None:
    """Released weights cannot be read, so there is no silent error of this kind."""
    target = "data_parallel.unit_sync:UnitSync._at_work"
    with planted(target, "(self._forward, self._backward)", "(self._forward,)"), pytest.raises(RankFailure):
        run_ranks(2, _train, {"zero_stage": 3})
