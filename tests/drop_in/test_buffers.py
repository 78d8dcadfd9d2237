"""Layouts of buffers, the buckets under Megatron Core's names, and settings of single parameters."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import reduce_scatter_with_fp32_accumulation
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    LayerWiseDistributedOptimizer,
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_mup_config_overrides,
)
from megatron.core.optimizer.muon import get_megatron_muon_optimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.optimizer.param_layout import BufferKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import sharded
from megatron.training.training import wrap_model_chunks_with_ddp
from megatron_core import parallel_state
from megatron_core.data_parallel import DataParallel, DataParallelSettings
from megatron_core.data_parallel.bucket_layout import InOrder, Packer
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.matrix_optimizers.whole_shards import WholeInShards
from megatron_core.parallel.current import current
from megatron_core.verify.ranks import run_ranks

SHARDED = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)


def buckets_of(sizes: list[int], rule: Any, bucket_size: int) -> list[tuple[list[int], list[int], int]]:
    packer = Packer[int](rule, bucket_size)
    closed = [each for i, n in enumerate(sizes) for each in packer.add(i, n, n)] + list(packer.close())
    return [(items, layout.offsets, layout.padded) for items, layout in closed]


def test_parameters_in_order() -> None:
    assert buckets_of([3, 5, 4, 2], InOrder(4, 16), 8) == [([0, 1], [0, 4], 16), ([2, 3], [0, 4], 16)]


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_no_shard_cuts_a_parameter(shards: int) -> None:
    sizes = [7, 100, 30, 30, 64, 5, 99, 1, 1, 80]
    found = buckets_of(sizes, WholeInShards(shards, 1, 8), 150)
    assert sorted(item for items, _, _ in found for item in items) == list(range(10))
    for items, offsets, padded in found:
        length = padded // shards
        assert length % 8 == padded % shards == 0
        ends = [at + sizes[item] for item, at in zip(items, offsets, strict=True)]
        assert all(end <= follows for end, follows in zip(ends, [*offsets[1:], padded], strict=True))
        assert all(at // length == (end - 1) // length for at, end in zip(offsets, ends, strict=True))


def test_expensive_matrices_are_spread() -> None:
    assert buckets_of([8, 8, 4, 4, 4, 4], WholeInShards(2), 1000) == [([0, 2, 4, 1, 3, 5], [0, 8, 12, 16, 24, 28], 32)]


def test_layouts_of_buffers() -> None:
    dense, shared, expert = (nn.Parameter(torch.zeros(n, 10)) for n in (9, 5, 7))
    shared.shared_embedding, expert.allreduce = True, False
    full = DistributedOptimizer.compute_full_param_layout([dense, shared, expert], None, 2, SHARDED, 256)
    plain = full.layouts[BufferKey(torch.float32, torch.float32, False)]
    assert plain.param_index_map == {shared: (0, 50, 0), dense: (128, 218, 1)}
    assert (plain.bucket_indices, plain.per_bucket_numel_unpadded) == ([(0, 128), (128, 256)], [50, 90])
    assert full.layouts[BufferKey(torch.float32, torch.float32, True)].bucket_indices == [(0, 256)]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def sharded_by_matrices() -> tuple[Any, ...]:
    parallel_state.initialize_model_parallel()
    inner = model()
    settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
    config = SimpleNamespace(calculate_per_token_loss=False)
    (ddp,) = wrap_model_chunks_with_ddp([inner], config, settings, use_layer_wise_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(OptimizerConfig("muon", lr=0.1, clip_grad=0.0), [ddp])
    ((matrices,),) = (b.buckets for b in ddp.buffers if b.buckets[0].bucket.kind.is_hidden_matrix)
    apart = next(b for b in ddp.buffers if matrices in b.buckets)
    owned = DistributedOptimizer._build_model_gbuf_range(apart, matrices.bucket_id)["param_map"]
    ddp(torch.ones(2, 6)).square().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    return (
        isinstance(optimizer, LayerWiseDistributedOptimizer) and settings.use_distributed_optimizer,
        [(r["param"].start, r["param"].size) for r in owned.values()],
        matrices.bucket.cuts_parameters,
        [p.detach() for p in inner.parameters()],
    )


def by_muon_alone() -> list[torch.Tensor]:
    """The wrapper does not know the optimizer, which lays out its buffers again."""
    parallel_state.initialize_model_parallel()
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(), model())
    (before,) = ddp.buffers
    optimizer = get_megatron_optimizer(OptimizerConfig("muon", lr=0.1, clip_grad=0.0), [ddp])
    assert len(ddp.buffers) == 2 and sum(b.numel for b in ddp.buffers) == before.numel
    ddp(torch.ones(2, 6)).square().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    return [p.detach() for p in ddp.module.parameters()]


def shared_by_an_optimizer() -> tuple[Any, ...]:
    """The wrapper shards nothing, until the optimizer asks for it."""
    parallel_state.initialize_model_parallel()
    settings = DistributedDataParallelConfig()
    ddp = DistributedDataParallel(None, settings, model())
    config = OptimizerConfig("muon", lr=0.1, clip_grad=0.0)
    optimizer = get_megatron_muon_optimizer(config, [ddp], layer_wise_distributed_optimizer=True)
    ddp(torch.ones(2, 6)).square().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    elements = sum(shard.main.numel() for shard in optimizer.optimizer.shards if shard.bucket.kind.is_hidden_matrix)
    is_layer_wise = isinstance(optimizer, LayerWiseDistributedOptimizer) and not settings.use_distributed_optimizer
    return is_layer_wise, elements, [p.detach() for p in ddp.module.parameters()]


def test_ranks_share_the_state_of_an_optimizer_of_matrices() -> None:
    expected = run_ranks(1, by_muon_alone)[0]
    for is_layer_wise, elements, weights in run_ranks(2, shared_by_an_optimizer):
        assert is_layer_wise and elements < 4 * 36
        for ours, alone in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, alone)


def test_muon_on_whole_matrices() -> None:
    expected = run_ranks(1, by_muon_alone)[0]
    for is_layer_wise, owned, cut, weights in run_ranks(2, sharded_by_matrices):
        assert (is_layer_wise, owned, cut) == (True, [(0, 36), (0, 36)], False)
        for ours, alone in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, alone)


def continued_with_matrix_state(folder: Path, kind: Literal["adaptive_muon", "soap"]) -> list[bool]:
    """Whether the weights after two steps are equal if another optimizer continues after the first one."""
    parallel_state.initialize_model_parallel()
    runs = []
    for _ in range(2):
        ddp = DistributedDataParallel(None, SHARDED, model())
        runs.append((ddp, get_megatron_optimizer(OptimizerConfig(kind, lr=0.1, clip_grad=0.0), [ddp])))

    def step(ddp: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        ddp(torch.arange(12.0).view(2, 6)).square().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()

    def state(ddp: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": sharded(ddp.module), "optimizer": optimizer.sharded_state_dict()}

    step(*runs[0])
    dist_checkpointing.save(state(*runs[0]), folder)
    dist_checkpointing.load(state(*runs[1]), folder)
    runs[1][1].load_state_dict(dist_checkpointing.load(state(*runs[1]), folder)["optimizer"])
    runs[1][1].reload_model_params()
    for run in runs:
        step(*run)
    pairs = zip(*(ddp.module.parameters() for ddp, _ in runs), strict=True)
    return [bool(torch.equal(one, other)) for one, other in pairs]


@pytest.mark.parametrize("kind", ["adaptive_muon", "soap"])
def test_the_state_of_matrices_is_in_checkpoints(kind: Literal["adaptive_muon", "soap"], tmp_path: Path) -> None:
    assert run_ranks(2, continued_with_matrix_state, tmp_path, kind) == [[True] * 8] * 2


STATES = {
    ("adam",): ("exp_avg", "exp_avg_sq"),
    ("sgd",): ("momentum_buffer",),
    ("sgd", "sgd_momentum"): (),
    ("lion",): ("exp_avg",),
    ("muon",): ("exp_avg", "exp_avg_sq"),
}


def state_keys() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The state that each optimizer names, compared with the state that it allocates for vectors."""
    parallel_state.initialize_model_parallel()
    found = []
    for name, *zeros in STATES:
        ddp = DistributedDataParallel(None, SHARDED, model())
        optimizer: Any = get_megatron_optimizer(OptimizerConfig(name, lr=0.1, **dict.fromkeys(zeros, 0.0)), [ddp])
        state = next(shard.state for shard in optimizer.optimizer.shards if not shard.bucket.kind.matrix)
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        views = [optimizer.optimizer.state[weight] for weight in weights]
        assert all(
            tensor.shape == weight.shape
            for view, weight in zip(views, weights, strict=True)
            for tensor in view.values()
        )
        assert {tensor.untyped_storage().data_ptr() for tensor in state.values()} <= {
            tensor.untyped_storage().data_ptr() for view in views for tensor in view.values()
        }
        assert all(optimizer._get_state_key_dtype(key) == tensor.dtype for key, tensor in state.items())
        found.append((optimizer.optimizer_state_keys, tuple(state)))
    return found


def test_keys_of_optimizer_state() -> None:
    assert run_ranks(1, state_keys)[0] == [(keys, keys) for keys in STATES.values()]


def buffers() -> tuple[Any, ...]:
    parallel_state.initialize_model_parallel()
    ddp = DistributedDataParallel(None, SHARDED, model())
    (buffer,) = ddp.buffers
    full = DistributedOptimizer.compute_full_param_layout(list(ddp.parameters()), None, 2, SHARDED)
    (expected,) = full.layouts.values()
    assert buffer.param_index_map == expected.param_index_map
    for view in buffer.buckets:
        view.grad_data.fill_(2.0)
        for parameter, (start, stop) in view.param_to_index.items():
            assert torch.equal(view.param_data[start:stop], parameter.detach().view(-1))
    buffer.scale_gradients(0.5)
    halved = [view.bucket.grad_shard.mean().item() for view in buffer.buckets]
    buffer.reset()
    for group in ddp.bucket_groups:
        for view in group.buckets:
            view.bucket.weight_shard.fill_(float(torch.distributed.get_rank()))
        group.start_param_sync(force_sync=True)
    ddp.free_overlap_buffers()
    return (
        halved,
        buffer.numel,
        [start % 64 for start, _, _ in buffer.param_index_map.values()],
        [sorted(set(view.param_data.tolist())) for view in buffer.buckets],
        ddp.expert_parallel_buffers,
        max(view.grad_data.abs().max().item() for view in buffer.buckets),
    )


def test_buckets_as_buffers() -> None:
    expected = [1.0], 512, [0] * 8, [[0.0, 1.0]], [], 0.0
    assert run_ranks(2, buffers) == [expected] * 2


def reduced_by_groups(strategy: str, overlap: bool) -> list[torch.Tensor]:
    """Gradients of two steps, summed by the groups of buckets and by the model, which must be equal."""
    parallel_state.initialize_model_parallel()
    settings = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, overlap_grad_reduce=overlap, bucket_size=40
    )
    ddp = DistributedDataParallel(None, settings, model())
    ddp.data_parallel.release()  # the hooks; this program has its own
    groups = {parameter: group for group in ddp.bucket_groups for parameter in group.params}
    seed, found = 10 + torch.distributed.get_rank(), []
    for step in range(4):
        ddp.zero_grad_buffer()
        generator = torch.Generator().manual_seed(seed + 7 * (step // 2))
        for buffer in ddp.buffers:
            buffer.grad_data.copy_(torch.randn(buffer.numel, generator=generator))
        if step % 2:
            ddp.finish_grad_sync()
        else:
            by_hand(ddp, groups, overlap=overlap, is_first=step == 0)
        found.append(torch.cat([bucket.grad_shard.clone() for bucket in ddp.buckets]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
    return found


def by_hand(ddp: Any, groups: dict[nn.Parameter, Any], *, overlap: bool, is_first: bool) -> None:
    """Announce each gradient, and sum; sums start with the last gradient of a group, except in the first step."""
    some = next(iter(groups))
    for parameter, group in groups.items():
        if not overlap:
            with pytest.raises(ConfigError, match="needs overlap_grad_reduce=True"):
                group.register_grad_ready(parameter)
            continue
        group.register_grad_ready(parameter)
        complete = len(group.per_param_grad_ready_counts) == len(group.params)
        if not complete and not is_first:
            with pytest.raises(ConfigError, match=r"of \d+ parameters have gradients; call register_grad_ready"):
                group.finish_grad_sync()
        assert all(view.bucket.reduced == (complete and not is_first) for view in group.buckets)
    groups[some].finish_grad_sync()
    if len(ddp.bucket_groups) > 1:
        with pytest.raises(ConfigError, match=r"called for 1 of \d+ groups"):
            ddp.finish_grad_sync()
    for group in ddp.bucket_groups:
        if group is not groups[some]:
            group.finish_grad_sync()
    ddp.finish_grad_sync()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_groups_of_buckets_sum_gradients(strategy: str, overlap: bool) -> None:
    for own in run_ranks(2, reduced_by_groups, strategy, overlap):
        assert len(own) == 4 and all(torch.isfinite(each).all() and each.abs().sum() > 0 for each in own)


def trained(strategy: str, offload: bool) -> list[torch.Tensor]:
    """Three steps; between them weights and gradients are moved off the device as in programs for reinforcement
    learning."""
    parallel_state.initialize_model_parallel()
    settings = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=strategy, overlap_grad_reduce=True, bucket_size=40
    )
    ddp = DistributedDataParallel(None, settings, model())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [ddp])
    (buffer,) = ddp.buffers
    sizes = [(t, t.storage().size()) for t in (buffer.param_data, buffer.grad_data)]
    assert [size for _, size in sizes] == [buffer.numel] * 2 and len(buffer.buckets) > 1
    for _ in range(3):
        if offload:
            kept = buffer.param_data.clone()
            for tensor, _ in sizes:
                tensor.storage().resize_(0)
            assert all(p.untyped_storage().nbytes() == 0 for p in ddp.parameters())
            with pytest.raises(ConfigError, match="param_data of a buffer is offloaded"):
                ddp(torch.ones(2, 6))
            for tensor, size in sizes:
                tensor.storage().resize_(size)
            buffer.param_data.copy_(kept)
            buffer.grad_data.zero_()
            ddp.offload_grad_buffers()
            with pytest.raises(ConfigError, match="grad_data of a buffer is offloaded"):
                ddp(torch.ones(2, 6))
            ddp.restore_grad_buffers()
            buffer.offload_to_cpu()
            assert buffer.param_data.storage().size() == buffer.grad_data.storage().size() == 0
            buffer.reload_from_cpu()
        ddp(torch.ones(2, 6)).square().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return [p.detach().clone() for p in ddp.module.parameters()]


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_weights_and_gradients_leave_memory_between_steps(strategy: str) -> None:
    found, kept = (run_ranks(2, trained, strategy, offload) for offload in (True, False))
    for ours, expected in zip(found, kept, strict=True):
        assert all(map(torch.equal, ours, expected))


def without_flat_tensors() -> None:
    parallel_state.initialize_model_parallel()
    settings = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim_grads_params")
    (buffer, *_) = DistributedDataParallel(None, settings, model()).buffers
    for name, what in (("param_data", "weights"), ("grad_data", "gradients")):
        with pytest.raises(ConfigError, match=f"frees the {what}, so .*use no_shard or optim"):
            getattr(buffer, name)


def test_what_is_freed_anyway_has_no_flat_tensor() -> None:
    run_ranks(2, without_flat_tensors)


def stepped(overrides: Any) -> list[torch.Tensor]:
    parallel_state.initialize_model_parallel()
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(), model())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.5, clip_grad=0.0), [ddp], overrides)
    ddp(torch.ones(2, 6)).square().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    return [p.detach() for p in ddp.module.parameters()]


def disagreeing() -> str:
    with pytest.raises(ConfigError) as caught:
        stepped({ParamKey(name=name): {"max_lr": len(name)} for name in ("2.*", "2.weight")})
    return str(caught.value)


def test_settings_of_single_parameters() -> None:
    """Compared with torch's AdamW with the same groups."""
    overrides = {
        ParamKey(name="*.bias"): {"wd_mult": 0.0},
        ParamKey(name="2.*"): {"max_lr": 0.01, "eps": 1e-3},
        ParamKey(predicate=ParamPredicate("none", lambda p: p.dim() > 2)): {"max_lr": 9.0},
    }
    inner = model()
    named = dict(inner.named_parameters())
    groups = [
        {
            "params": [parameter],
            "lr": 0.01 if name[0] == "2" else 0.1,
            "eps": 1e-3 if name[0] == "2" else 1e-8,
            "weight_decay": 0.0 if name.endswith("bias") else 0.5,
        }
        for name, parameter in named.items()
    ]
    inner(torch.ones(2, 6)).square().sum().backward()
    torch.optim.AdamW(groups).step()
    for ours, expected in zip(run_ranks(1, stepped, overrides)[0], named.values(), strict=True):
        torch.testing.assert_close(ours, expected.detach())
    assert "two overrides of max_lr: 3 and 8" in run_ranks(1, disagreeing)[0]


def test_rates_of_maximal_update_parametrisation() -> None:
    config = OptimizerConfig(lr=0.1, min_lr=0.01)
    ((key, override),) = get_mup_config_overrides(config, 4.0).items()
    matrix, vector = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    assert override == {"max_lr": 0.025, "min_lr": 0.0025, "eps": 2.5e-9}
    assert [key.matches(p, n) for p, n in ((matrix, "a"), (vector, "a"), (matrix, "embedding.a"))] == [1, 0, 0]
    ((key, override),) = get_mup_config_overrides(config, 4.0, "sgd").items()
    assert override == {"max_lr": 0.4, "min_lr": 0.04}
    assert (key.matches(matrix, "a"), key.matches(vector, "a")) == (False, True)
    assert get_mup_config_overrides(config, 1.0) == {}


def test_saved_groups_find_their_own() -> None:
    first, second = {"max_lr": 1.0, "wd_mult": 1.0}, {"max_lr": 2.0, "wd_mult": 1.0}
    saved = [{"max_lr": 2.0, "pre_wd_mult": 1.0, "n": 2}, first | {"n": 1}]
    found = MegatronOptimizer._filter_and_reorder_param_groups([first, second], saved)
    assert [group["n"] for group in found] == [1, 2]
    with pytest.raises(CheckpointError, match="no parameter group"):
        MegatronOptimizer._filter_and_reorder_param_groups([{"max_lr": math.pi}], saved)


def summed(wide: bool) -> list[torch.Tensor]:
    """The value of a shard if bfloat16 cannot represent 257: 256 + 1 + 1 + 1."""
    parallel_state.initialize_model_parallel()
    groups = current()
    found = []
    for stage in (1, 2):
        data = DataParallel(
            {0: nn.Linear(8, 8, bias=False)},
            groups,
            DataParallelSettings(zero_stage=stage, wire_dtype=torch.bfloat16, sums_wide=wide),
        )
        (bucket,) = data.buckets
        for _ in range(2 if stage == 2 else 1):  # at stage 2 the gradients of several micro-batches are summed
            bucket.open_grads()
            bucket.grads.fill_(256.0 if groups.rank == 0 else 1.0)
            data.finish_grad_sync()
        found.append(bucket.grad_shard.clone())
    rows = torch.full((4 * 3,), 256.0 if groups.rank == 0 else 1.0, dtype=torch.bfloat16)
    out = torch.zeros(3)
    handle = reduce_scatter_with_fp32_accumulation(out, rows, async_op=True)
    assert handle is not None
    handle.wait()
    with pytest.raises(AssertionError, match="has 11 elements; give 12"):
        reduce_scatter_with_fp32_accumulation(out, rows, all_to_all_output_tensor=rows[1:])
    return [*found, out]


def test_sums_in_float32_of_what_travels_in_16_bits() -> None:
    for first, second, out in run_ranks(4, summed, True):
        assert (first.unique().tolist(), second.unique().tolist(), out.tolist()) == ([259.0], [518.0], [259.0] * 3)
    assert run_ranks(4, summed, False)[0][0].unique().tolist() != [259.0]


def chained(separate: bool) -> tuple[float, list[torch.Tensor], list[str]]:
    """Two steps of two models with one optimizer each, or of both as chunks of one optimizer, saved and loaded."""
    parallel_state.initialize_model_parallel()
    settings = OptimizerConfig(lr=0.1, weight_decay=0.0, clip_grad=0.5)
    torch.manual_seed(3)
    models = [nn.ModuleDict({name: nn.Linear(6, 6)}) for name in "ab"]
    wrapped = [DistributedDataParallel(None, DistributedDataParallelConfig(), inner) for inner in models]
    each = [
        get_megatron_optimizer(settings, chunks) for chunks in ([wrapped[:1], wrapped[1:]] if separate else [wrapped])
    ]
    optimizer = ChainedOptimizer(each) if separate else each[0]
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        for i, inner in enumerate(models):
            (next(iter(inner.values()))(torch.ones(2, 6)).square().sum() * (i + 1)).backward()
        for chunk in wrapped:
            chunk.finish_grad_sync()
        taken, norm, _ = optimizer.step()
        assert taken
        norms.append(norm)
        state = optimizer.sharded_state_dict()
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    kinds = [type(one).__name__ for one in each]
    assert len(optimizer.get_parameters()) == 4
    return norms[-1], [p.detach() for inner in models for p in inner.parameters()], kinds


def step_by_the_schedule() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights after a step whose learning rate is only in the schedule, and those of SGD's equation."""
    parallel_state.initialize_model_parallel()
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(), model())
    before = [parameter.detach().clone() for parameter in ddp.module.parameters()]
    optimizer = get_megatron_optimizer(OptimizerConfig("sgd", sgd_momentum=0.0, clip_grad=0.0, weight_decay=0.0), [ddp])
    ddp(torch.ones(2, 6)).square().sum().backward()
    ddp.finish_grad_sync()
    with pytest.raises(ConfigError, match="lr=None; give the learning rate, or set it by OptimizerParamScheduler"):
        optimizer.step()
    rates = {"init_lr": 0.0, "max_lr": 0.25, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 8}
    OptimizerParamScheduler(optimizer, **rates, lr_decay_style="constant", **NO_DECAY)
    optimizer.step()
    pairs = zip(before, ddp.module.parameters(), strict=True)
    return [(new.detach(), old - 0.25 * new.main_grad) for old, new in pairs]  # type: ignore[attr-defined]


NO_DECAY: Any = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 0, "wd_incr_style": "constant"}


def test_the_schedule_may_give_the_learning_rate() -> None:
    for ours, expected in run_ranks(1, step_by_the_schedule)[0]:
        torch.testing.assert_close(ours, expected)


def test_optimizers_of_several_models_clip_together() -> None:
    (norm, found, kinds), (whole_norm, expected, _) = (run_ranks(1, chained, each)[0] for each in (True, False))
    assert (norm, kinds) == (pytest.approx(whole_norm, rel=1e-6), ["FP32Optimizer"] * 2)
    for ours, weight in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, weight)
    assert issubclass(DistributedOptimizer, MixedPrecisionOptimizer) and issubclass(ChainedOptimizer, MegatronOptimizer)


def step_with_replaced_gradients(strategy: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Weights after two steps with tensors that the program has assigned, and those of SGD's equation."""
    parallel_state.initialize_model_parallel()
    ddp = DistributedDataParallel(
        None, DistributedDataParallelConfig(data_parallel_sharding_strategy=strategy), model()
    )
    expected = [parameter.detach().clone() for parameter in ddp.module.parameters()]
    settings = OptimizerConfig("sgd", lr=0.5, sgd_momentum=0.0, clip_grad=0.0, weight_decay=0.0)
    optimizer = get_megatron_optimizer(settings, [ddp])
    for number in (1, 2):
        for weight, parameter in zip(expected, ddp.module.parameters(), strict=True):
            parameter.main_grad = torch.full_like(parameter, float(number))  # type: ignore[attr-defined]
            weight -= 0.5 * number
        _, norm, _ = optimizer.step()
        assert norm == pytest.approx(number * sum(weight.numel() for weight in expected) ** 0.5)
        assert not any(buffer.grad_data.any() for buffer in ddp.buffers)
    return [(new.detach(), old) for new, old in zip(ddp.module.parameters(), expected, strict=True)]


@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_gradients_that_a_program_assigns_update_the_weights(strategy: str) -> None:
    for pairs in run_ranks(2, step_with_replaced_gradients, strategy):
        for found, expected in pairs:
            torch.testing.assert_close(found, expected)
