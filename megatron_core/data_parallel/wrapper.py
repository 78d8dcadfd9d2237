"""Gradients of all stages of a rank: accumulated, completed, and summed over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from megatron_core.data_parallel.buffer import Bucket, make_buckets
from megatron_core.data_parallel.finalize import complete_gradients
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import replicated, spec_of


class DataParallel:
    """Keeps the gradients of ``stages`` in flat buckets and reduces them once a step.

    Losses are expected to be normalised by the whole global batch already, so that gradients are summed, never
    averaged. With ``overlap_grad_reduce`` a bucket's sum begins as soon as the last micro-batch's backward has
    finished with its parameters; buckets whose gradients are partial wait for ``finish_grad_sync``. With
    ``overlap_param_gather`` a module waits for its own parameters just before its forward: a parameter may be read only
    once the forward of the module that owns it has begun.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        groups: ParallelGroups,
        *,
        zero_stage: int = 0,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        bucket_size: int = 40_000_000,
        device: torch.device | None = None,
    ) -> None:
        self.groups, self.zero_stage = groups, zero_stage
        self.overlap_grad_reduce, self.overlap_param_gather = overlap_grad_reduce, overlap_param_gather
        self.buckets: list[Bucket] = []
        self.frozen = [(n, p) for module in stages.values() for n, p in _named(module) if not p.requires_grad]
        for stage, module in stages.items():
            units = units_of(module, groups)
            self.buckets += make_buckets(units, stage, groups, bucket_size=bucket_size, zero_stage=zero_stage)
        # A rank without parameters needs it, too: it takes part in collectives over all ranks.
        self.device = device or next((bucket.weights.device for bucket in self.buckets), torch.device("cpu"))
        self._waiting: dict[Bucket, int] = {}
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._accumulator(bucket))
        if overlap_param_gather:
            for module in stages.values():
                self._wait_before_forward(module)

    def zero_grad(self) -> None:
        """Begin a new step."""
        for bucket in self.buckets:
            bucket.zero_grad()

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
        for bucket in self.buckets:
            if not bucket.reduced:
                complete_gradients(bucket, self.groups)
                bucket.start_reduce()
        for bucket in self.buckets:
            bucket.finish_reduce()

    def start_param_sync(self) -> None:
        """Begin to gather the weights that other ranks have updated; with overlap, they are waited for when needed."""
        for bucket in self.buckets:
            bucket.start_gather()
        if not self.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for all weights."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def frozen_on_first_copy(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that are not trained, on the first of the data-parallel ranks that have copies of them."""
        axes = [(pair, "-".join(spec_of(pair[1]).replica_axes)) for pair in self.frozen]
        return [pair for pair, names in axes if self.groups.group(names).rank() == 0]

    def _early(self, stage: int) -> list[Bucket]:
        return [b for b in self.buckets if b.stage == stage and not b.kind.is_partial]

    def _accumulator(self, bucket: Bucket):
        def accumulate(parameter: nn.Parameter) -> None:
            # Linear layers have added to main_grad themselves and leave no grad; the hook runs all the same.
            if parameter.grad is not None:
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
        bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        for module in root.modules():
            needed = list(dict.fromkeys(bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of))
            if needed:
                module.register_forward_pre_hook(_waiter(needed))


def _waiter(buckets: list[Bucket]):
    def wait(module: nn.Module, args: object) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait


def units_of(module: nn.Module, groups: ParallelGroups) -> list[list[tuple[str, nn.Parameter]]]:
    """The named parameters of a stage by unit: what the module's ``units()`` lists, or else each of its children.

    A parameter in no unit is a part of the first one, a parameter in several of the first of them. Parameters without a
    ``ShardSpec`` get that of a tensor which is whole on every rank.
    """
    declared: Any = getattr(module, "units", None)
    units = [[child] for child in module.children()] if declared is None else declared()
    number = {p: i for i, modules in reversed(list(enumerate(units))) for m in modules for p in m.parameters()}
    result: list[list[tuple[str, nn.Parameter]]] = [[] for _ in range(max(len(units), 1))]
    for name, parameter in _named(module):
        if not hasattr(parameter, "shard_spec"):
            parameter.shard_spec = replicated(tuple(parameter.shape), groups.index("tp"))
        result[number.get(parameter, 0)].append((name, parameter))
    return result


def _named(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    """Global names where the model knows them."""
    named = getattr(module, "named_global_parameters", module.named_parameters)
    return named()
