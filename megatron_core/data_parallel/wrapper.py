"""Gradients of all stages of a rank: accumulated, completed, and summed over data-parallel ranks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_core.data_parallel.buffer import Bucket, BucketKind, Compressor, Initialise, materialise
from megatron_core.data_parallel.fill import in_order, make_buckets
from megatron_core.data_parallel.finalize import complete_gradients, complete_shard, complete_shared
from megatron_core.data_parallel.layout import Rule
from megatron_core.data_parallel.placement import DiskPlacement
from megatron_core.data_parallel.unit_sync import UnitOptions, UnitSync
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import replicated, spec_of
from megatron_core.schedules.actions import Action


class DataParallel:
    """Keeps the gradients of ``stages`` in flat buckets and reduces them.

    Losses are expected to be normalised by the whole global batch already, so that gradients are summed, never
    averaged. ``zero_stage`` (Rajbhandari et al. 2020, section 5): 0 sums gradients on every rank, 1 leaves each rank
    the sums of its shard, once a step; 2 reduces a unit's gradients whenever its backward ends and keeps the shard
    alone, and 3 keeps a shard of the weights alone, too, matrices that are not trained included, and gathers a unit's
    for its forward and backward.

    With ``overlap_grad_reduce`` a bucket's sum begins as soon as the last micro-batch's backward (from stage 2 on:
    each one's) has finished with its parameters; buckets whose gradients are partial wait for ``finish_grad_sync``.
    With ``overlap_param_gather`` a unit waits for its own parameters just before its forward, at stage 3 the next one
    is gathered meanwhile: a parameter may be read only once the forward of a module of its unit has begun.
    ``wire_dtype`` is the dtype in which gradients travel and are summed, by default their own; with ``sums_wide``
    shards are summed in their own all the same. ``compressor`` sums them lossily.
    ``keep_after_forward`` keeps the weights that stage 3 has gathered to the end of the step; in ``weights_folder`` lie
    its shards, if it is given. ``rule_of`` says how buckets are filled (``make_buckets``). Parameters
    on the meta device get memory on ``device``, a bucket at a time, and ``initialise`` fills it.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        groups: ParallelGroups,
        *,
        zero_stage: int = 0,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        keep_after_forward: bool = False,
        bucket_size: int = 40_000_000,
        device: torch.device | None = None,
        wire_dtype: torch.dtype | None = None,
        sums_wide: bool = False,
        compressor: Compressor | None = None,
        initialise: Initialise | None = None,
        weights_folder: Path | None = None,
        rule_of: Callable[[BucketKind, int], Rule] = in_order,
    ) -> None:
        self.groups, self.zero_stage = groups, zero_stage
        self.overlap_grad_reduce, self.overlap_param_gather = overlap_grad_reduce, overlap_param_gather
        self.buckets: list[Bucket] = []
        self.frozen_buckets: list[Bucket] = []
        """At stage 3 the matrices that are not trained, for which there are no gradients and no optimizer state."""
        is_meta = device is not None and device.type == "meta"

        def on_disk() -> DiskPlacement:
            return DiskPlacement(weights_folder or Path(), groups.rank, "zero3_param_offload_dir")

        for stage, module in stages.items():
            make = partial(
                make_buckets,
                units_of(module, groups),
                stage,
                groups,
                bucket_size=bucket_size,
                zero_stage=zero_stage,
                device=device,
                initialise=initialise,
                on_disk=on_disk if weights_folder is not None and not is_meta else None,
                rule_of=rule_of,
            )
            self.buckets += make()
            self.frozen_buckets += make(frozen=True) if zero_stage == 3 else []
        self._bucket_of = {p: bucket for bucket in self.all_buckets for p in bucket.parameters}
        self.frozen = [(n, p) for module in stages.values() for n, p in _named(module) if p not in self._bucket_of]
        """Parameters that are not trained and whole on every rank: all of them below stage 3, there vectors."""
        for name, parameter in self.frozen:
            if parameter.is_meta and device is not None and device.type != "meta":
                materialise(parameter, torch.zeros_like(parameter, device=device), name, initialise)
        self.compressor = compressor
        for bucket in self.buckets:
            bucket.wire_dtype, bucket.compressor = wire_dtype or bucket.wire_dtype, compressor
            bucket.sums_wide = sums_wide
            bucket.model_group = groups.group("etp" if "edp" in bucket.kind.replica_axes else "tp")
        # A rank without parameters needs it, too: it takes part in collectives over all ranks.
        self.device = device or next((bucket.weights.device for bucket in self.buckets), torch.device("cpu"))
        self._waiting: dict[Bucket, int] = {}
        self._sync: dict[int, UnitSync] = {}
        if any(bucket.splits_grads or bucket.splits_weights for bucket in self.all_buckets):
            options = UnitOptions(overlap_grad_reduce, overlap_param_gather, keep_after_forward)
            self._sync = {stage: self._unit_sync(stage, module, options) for stage, module in stages.items()}
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._accumulator(bucket))
                if bucket.splits_grads:
                    parameter.open_grad = self._opener(bucket)
        if overlap_param_gather and zero_stage < 3:
            for module in stages.values():
                self._wait_before_forward(module)

    @property
    def all_buckets(self) -> list[Bucket]:
        """Those that are trained, and those that are not."""
        return self.buckets + self.frozen_buckets

    def zero_grad(self) -> None:
        """Begin a new step."""
        for bucket in self.buckets:
            bucket.zero_grad()

    def begin_action(self, action: Action) -> None:
        """A forward (F) or backward (B, I, W) of a stage begins."""
        if action.stage in self._sync:
            self._sync[action.stage].begin(action.kind)

    def end_action(self, action: Action) -> None:
        """A forward or backward of a stage has ended."""
        if action.stage in self._sync:
            self._sync[action.stage].end()

    def enable_grad_sync(self, stage: int) -> None:
        """Announce that the next backward of ``stage`` is its last one in this step."""
        if self.overlap_grad_reduce:
            self._waiting.update({b: len(b.parameters) for b in self._early(stage)})

    def start_grad_sync(self, stage: int) -> None:
        """Begin to reduce the gradients of ``stage``, which are complete: for a last backward that is split, whose
        parameters finish in no known order."""
        if self.overlap_grad_reduce:
            for bucket in self._early(stage):
                if not bucket.reduced:
                    bucket.start_reduce()

    def finish_grad_sync(self) -> None:
        """Complete and sum all gradients; afterwards each bucket's ``grad_shard`` is final."""
        self._waiting.clear()
        for sync in self._sync.values():
            sync.end()
            sync.finish_reduce()
        for bucket in self.buckets:
            if bucket.has_grads if bucket.splits_grads else not bucket.reduced:
                self._start_reduce(bucket)
        for bucket in self.buckets:
            bucket.finish_reduce()
            if bucket.splits_grads:
                complete_shard(bucket, self.groups)
            bucket.sum_over_instances()

    def start_param_sync(self) -> None:
        """Begin to gather the weights that other ranks have updated; with overlap, they are waited for when needed.

        Stage 3 frees what is outdated, and gathers when a unit's forward begins.
        """
        for sync in self._sync.values():
            sync.release()
        for bucket in self.buckets:
            if not bucket.splits_weights:
                bucket.start_gather()
        if not self.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for all weights that are on their way."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of the weights and gradients that stay, and of the most that is whole for a while besides."""
        shards = {"weights": 0, "gradients": 0}
        units: dict[tuple[int, int], int] = {}
        for bucket in self.all_buckets:
            in_memory = bucket.weight_shard.nbytes * (bucket.disk is None)
            shards["weights"] += in_memory if bucket.splits_weights else bucket.weights.nbytes
            shards["gradients"] += bucket.grad_shard.nbytes if bucket.splits_grads else bucket.grads.nbytes
            at = bucket.stage, bucket.unit
            units[at] = units.get(at, 0) + bucket.weights.nbytes * bucket.splits_weights
            units[at] += bucket.grads.nbytes * bucket.splits_grads
        at_once = 2 if self.overlap_grad_reduce or self.overlap_param_gather else 1
        pairs = [sum(list(units.values())[i : i + at_once]) for i in range(len(units))]
        return shards | ({"units whole": max(pairs)} if max(pairs, default=0) else {})

    def reading(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Each of ``parameters`` while its weights are whole and up to date, which at stage 3 is one unit at a time.

        All ranks ask for the same ones of their stages.
        """
        self.finish_param_sync()
        gathered: list[Bucket] = []
        for parameter in parameters:
            bucket = self._bucket_of.get(parameter)
            if bucket is not None and bucket.splits_weights and bucket not in gathered:
                kept = [b for b in gathered if (b.stage, b.unit) == (bucket.stage, bucket.unit)]
                for other in gathered:
                    if other not in kept:
                        other.release_weights()
                bucket.start_gather()
                bucket.finish_gather()
                gathered = [*kept, bucket]
            yield parameter
        for bucket in gathered:
            bucket.release_weights()

    def frozen_on_first_copy(self) -> list[tuple[str, nn.Parameter]]:
        """``frozen`` on the first of the data-parallel ranks that have copies of them."""
        axes = [(pair, "-".join(spec_of(pair[1]).replica_axes)) for pair in self.frozen]
        return [pair for pair, names in axes if self.groups.group(names).rank() == 0]

    def _unit_sync(self, stage: int, module: nn.Module, options: UnitOptions) -> UnitSync:
        own = [bucket for bucket in self.all_buckets if bucket.stage == stage]
        return UnitSync(module, modules_of(module), own, self._bucket_of, options, self._start_reduce)

    def _start_reduce(self, bucket: Bucket) -> None:
        """What has to be complete before a bucket is split is completed first."""
        (complete_shared if bucket.splits_grads else complete_gradients)(bucket, self.groups)
        bucket.start_reduce()

    def _opener(self, bucket: Bucket) -> Callable[[], None]:
        def open_grad() -> None:
            self._sync[bucket.stage].opened(bucket)
            bucket.open_grads()

        return open_grad

    def _early(self, stage: int) -> list[Bucket]:
        """Buckets whose sums may begin before all gradients of the step are there."""
        return [b for b in self.buckets if b.stage == stage and not b.kind.is_partial and not b.splits_grads]

    def _accumulator(self, bucket: Bucket):
        def accumulate(parameter: nn.Parameter) -> None:
            # Linear layers have added to main_grad themselves and leave no grad; the hook runs all the same.
            if parameter.grad is not None:
                bucket.open_grads()
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None
            if bucket in self._waiting:
                self._waiting[bucket] -= 1
                self._reduce_ready(bucket.stage)

        return accumulate

    def _reduce_ready(self, stage: int) -> None:
        """Start complete buckets, never one before its predecessor: all ranks must start them in the same order."""
        for bucket in self._early(stage):
            if bucket.reduced:
                continue
            if self._waiting.get(bucket) != 0:
                return
            bucket.start_reduce()

    def _wait_before_forward(self, root: nn.Module) -> None:
        """Wait for a unit's weights when the first of its modules is called: the others may never be."""
        for modules in modules_of(root):
            read = [self._bucket_of[p] for module in modules for p in module.parameters() if p in self._bucket_of]
            for module in dict.fromkeys(inner for each in modules for inner in each.modules()):
                if module in modules or next(module.parameters(recurse=False), None) is not None:
                    module.register_forward_pre_hook(_waiter(list(dict.fromkeys(read))))


def _waiter(buckets: list[Bucket]):
    def wait(module: nn.Module, args: object) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait


def modules_of(module: nn.Module) -> list[list[nn.Module]]:
    """The modules of a stage's units: what its ``units()`` lists, or else each child; without any the stage itself."""
    declared: Any = getattr(module, "units", None)
    units = [[child] for child in module.children()] if declared is None else declared()
    return units or [[module]]


def units_of(module: nn.Module, groups: ParallelGroups) -> list[list[tuple[str, nn.Parameter]]]:
    """The named parameters of a stage by unit: what the module's ``units()`` lists, or else each of its children.

    A parameter in no unit is a part of the first one, a parameter in several of the first of them. Parameters without a
    ``ShardSpec`` get that of a tensor which is whole on every rank; ``allreduce=False`` marks those of experts, which
    only expert-data-parallel ranks share.
    """
    units = modules_of(module)
    number = {p: i for i, modules in reversed(list(enumerate(units))) for m in modules for p in m.parameters()}
    result: list[list[tuple[str, nn.Parameter]]] = [[] for _ in units]
    for name, parameter in _named(module):
        if not hasattr(parameter, "shard_spec"):
            expert = not getattr(parameter, "allreduce", True)
            axis = "etp" if expert else "tp"
            spec = replicated(tuple(parameter.shape), groups.index(axis), axis=axis)
            parameter.shard_spec = replace(spec, replica_axes=("edp",)) if expert else spec
        result[number.get(parameter, 0)].append((name, parameter))
    return result


def _named(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Global names where the model knows them."""
    named = getattr(module, "named_global_parameters", module.named_parameters)
    return named()
