"""Gradients of all stages of a rank: accumulation, completion, and summation over data-parallel ranks.

Partial gradients are completed before they are summed over data-parallel ranks. All these sums are linear, so the
data-parallel sum could also come first. It comes last: each rank then has whole gradients, and the code does not depend
on the assignment of shards to ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_core.data_parallel.awaited_parameter import await_reads
from megatron_core.data_parallel.buffer import Bucket, Compressor
from megatron_core.data_parallel.early_sums import EarlySums, complete_shard
from megatron_core.data_parallel.fill import Announced, global_parameters, make_buckets, modules_of_units, units_of
from megatron_core.data_parallel.memory import BucketMemory
from megatron_core.data_parallel.settings import DataParallelSettings
from megatron_core.data_parallel.split_parameter import release
from megatron_core.data_parallel.unit_sync import UnitSync
from megatron_core.errors import LayoutError
from megatron_core.parallel.compiled import outside_of_graphs, runs_graphs
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.handles import Done
from megatron_core.parallel.sharding import spec_of
from megatron_core.schedules.actions import Action
from megatron_core.tensor_parallel.linear import number_weights


class DataParallel(EarlySums):
    """Keeps the gradients of ``stages`` in flat buckets and reduces them.

    Losses must be normalised by the global batch: gradients are summed. At ZeRO stage (Rajbhandari et al. 2020,
    section 5)

    - 0 every rank gets all summed gradients.
    - 1 each rank gets the sum of its shard, once per step.
    - 2 a unit's gradients are reduced after each backward, and only the shard is kept.
    - 3 also only a shard of the weights is kept; units are gathered for forward and backward.

    ``units``: the modules of each stage's units; other parameters form one more unit.
    """

    # Gradients are summed and never averaged: the loss of a token is divided by the number of tokens of the whole
    # batch before backward, so that ranks with unequal numbers of tokens have the weights that one process gives them.
    # With ``overlap_param_gather`` a parameter may be read only after the forward of a module of its unit has begun.
    # ``compressor`` sums the gradients of all micro-batches lossily, once per step.

    is_saved: Callable[[str], bool] = staticmethod(lambda name: True)
    """Whether checkpoints contain the weight of this name; see ``training.parts.AddedWeights.saved_alone``."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        groups: ParallelGroups,
        settings: DataParallelSettings | None = None,
        *,
        memory: BucketMemory | None = None,
        compressor: Compressor | None = None,
        units: Mapping[int, list[list[nn.Module]]] | None = None,
    ) -> None:
        self.settings = settings = settings or DataParallelSettings()
        self.groups = groups
        self.compressor = compressor
        self._units = {stage: modules_of_units(module) for stage, module in stages.items()} if units is None else units
        self._has_rest = units is not None
        self.memory = memory = memory or BucketMemory()
        self.buckets: list[Bucket] = []
        self.frozen_buckets: list[Bucket] = []
        """Buckets of frozen matrices at stage 3, without gradients or optimizer state."""
        for stage, module in stages.items():
            named = units_of(module, groups, self._units[stage], has_rest=self._has_rest)
            self.buckets += make_buckets(named, stage, groups, settings, memory)
            if settings.zero_stage == 3:
                self.frozen_buckets += make_buckets(named, stage, groups, settings, memory, frozen=True)
        # Frozen parameters outside of buckets.
        self._bucket_of = {p: bucket for bucket in self.all_buckets for p in bucket.parameters}
        self.frozen = [
            (n, p) for module in stages.values() for n, p in global_parameters(module) if p not in self._bucket_of
        ]
        """Frozen parameters that are whole on every rank: below stage 3 all of them, at stage 3 only vectors."""
        for name, parameter in self.frozen:
            if parameter.is_meta and memory.device is not None:
                memory.adopt(name, parameter, torch.zeros_like(parameter, device=memory.device))
        for bucket in self.buckets:
            bucket.compressor = compressor
            bucket.model_group = groups.group("etp" if "edp" in bucket.kind.replica_axes else "tp")
        # Ranks without parameters also need a device, for collectives over all ranks.
        self.device = memory.device or next((bucket.weights.device for bucket in self.buckets), torch.device("cpu"))
        self.grad_factor = 1.0  # of gradients from autograd; layers that add to main_grad themselves ignore it
        self._waiting = {}
        self._micro_batches: dict[int, int] = {}
        """Micro-batch of the last backward of each stage, which has summed gradients at stages 2 and 3."""
        self.hooks: list[RemovableHandle] = []
        self._sync: dict[int, UnitSync] = {}
        self._attach(stages)

    def _attach(self, stages: Mapping[int, nn.Module]) -> None:
        """Register the hooks for gathering, accumulation and reduction."""
        if any(bucket.splits_grads or bucket.splits_weights for bucket in self.all_buckets):
            for stage, module in stages.items():
                self._sync[stage] = UnitSync(
                    module,
                    self._units[stage],
                    [bucket for bucket in self.all_buckets if bucket.stage == stage],
                    self._bucket_of,
                    self.settings,
                    self._start_reduce,
                    self._announce_collective,
                    has_rest=self._has_rest,
                )
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                # After accumulation: the gradient of a parameter that is used several times is complete only then.
                self.hooks.append(parameter.register_post_accumulate_grad_hook(self._accumulator(bucket)))
                if bucket.splits_grads:
                    parameter.open_grad = self._opener(bucket)
        # Graphs have no parameter objects, only their numbers.
        for module in (module for stage in stages.values() for module in stage.modules() if runs_graphs(module)):
            number_weights(p for p in module.parameters() if p.requires_grad)
        unsplit = {parameter: bucket for parameter, bucket in self._bucket_of.items() if not bucket.splits_weights}
        for stage in stages if self.settings.overlap_param_gather and unsplit else ():
            outer_buckets = [bucket for bucket in unsplit.values() if (bucket.stage, bucket.unit) == (stage, 0)]
            self.hooks += wait_before_forward(
                stages[stage],
                self._units[stage],
                unsplit,
                self.finish_param_sync,
                at_root=list(dict.fromkeys(outer_buckets)) if self._has_rest else [],
            )

    @property
    def all_buckets(self) -> list[Bucket]:
        """Buckets of trained and of frozen parameters."""
        return self.buckets + self.frozen_buckets

    def release(self) -> None:
        """Remove the hooks: the garbage collector does not see that those of parameters refer to this object."""
        for hook in [*self.hooks, *(hook for sync in self._sync.values() for hook in sync.hooks)]:
            hook.remove()

    def zero_grad(self) -> None:
        """Set the gradients of all buckets to zero, for a new step."""
        self._waiting.clear()
        self._micro_batches.clear()
        for sync in self._sync.values():
            sync.on_reduced = None
            sync.finish_reduce()
        for bucket in self.buckets:
            if bucket.is_reducing:
                bucket.finish_reduce()
            if bucket.splits_grads and bucket.has_grads:
                release(bucket.grads)
            bucket.zero_grad()

    def begin_action(self, action: Action) -> None:
        """Called before a forward (F) or backward (B, I, W) of a stage.

        Only the first backward of a micro-batch sums gradients at stages 2 and 3: ranks have equally many of these.
        """
        # A program may call backward again for the same micro-batch; the ranks do not agree on how often.
        is_first = action.kind in ("B", "W") and self._micro_batches.get(action.stage) != action.micro
        if is_first:
            self._micro_batches[action.stage] = action.micro
        if action.stage in self._sync:
            self._sync[action.stage].begin(action.kind, reduces=is_first)

    def end_action(self, action: Action) -> None:
        """Called after a forward or backward of a stage."""
        if action.kind == "B" and any(bucket.stage == action.stage for bucket in self._waiting):
            # Ranks on which a parameter had no gradient must not start these sums after those of other stages.
            self.start_grad_sync(action.stage)
        if action.stage in self._sync:
            self._sync[action.stage].end()

    def finish_grad_sync(self) -> None:
        """Complete and sum all gradients; afterwards each bucket's ``grad_shard`` is final."""
        self._waiting.clear()
        for sync in self._sync.values():
            sync.end()
            sync.finish_reduce()
            sync.on_reduced = None
        late = self._late_buckets()
        # Ranks with common tied weights sum them in one order, whatever other weights they have.
        tied = sorted((bucket for bucket in self.buckets if bucket.kind.tied), key=lambda bucket: bucket.names)
        ordered = tied + [bucket for bucket in self.buckets if not bucket.kind.tied]
        for bucket in ordered:
            # One sum per step, or one for each micro-batch of which only late gradients are left.
            once = bucket.compresses or not bucket.splits_grads
            if not bucket.reduced if once else bucket in late:
                self._start_reduce(bucket)
        for bucket in ordered:
            # All sums have started before the first wait, so that they travel together.
            bucket.finish_reduce()
            if bucket in late:
                self._add_late(bucket)
            if bucket.completes_shard:
                complete_shard(bucket, self.groups)
            bucket.sum_over_instances()
            bucket.round_sum()
            if self.on_final is not None:
                self.on_final(bucket)

    def _late_buckets(self) -> set[Bucket]:
        """Return the buckets with gradients whose sum has not started, though it starts before the end of a step."""
        return {bucket for bucket in self.buckets if bucket.splits_grads and bucket.has_grads}

    def _add_late(self, bucket: Bucket) -> None:
        """Add gradients that arrived after the bucket's sum had started; the stages of this project have none."""

    def start_param_sync(self) -> None:
        """Start to gather the weights that other ranks have updated; with overlap, wait for them only before their use.

        Stage 3 frees outdated weights, and gathers them when a unit's forward begins.
        """
        for sync in self._sync.values():
            sync.release()
        for bucket in self.buckets:
            if not bucket.splits_weights:
                bucket.start_gather()
                # Weights arrive during the forward of earlier layers; the first read of each waits for its own bucket.
                if self.settings.overlap_param_gather:
                    bucket.gathering = await_reads(bucket.parameters, bucket.gathering, bucket.finish_gather)
        if not self.settings.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for all pending gathers."""
        for bucket in self.buckets:
            bucket.finish_gather()

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes of permanent weights and gradients, and the maximum of temporary whole units."""
        shards = {"weights": sum(parameter.nbytes for _, parameter in self.frozen), "gradients": 0}
        units: dict[tuple[int, int], int] = {}
        for bucket in self.all_buckets:
            in_memory = bucket.weight_shard.nbytes * (not bucket.placement.is_offloaded)
            shards["weights"] += in_memory if bucket.splits_weights else bucket.weights.nbytes
            shards["gradients"] += bucket.grad_shard.nbytes if bucket.splits_grads else bucket.grads.nbytes
            key = bucket.stage, bucket.unit
            units[key] = units.get(key, 0) + bucket.weights.nbytes * bucket.splits_weights
            units[key] += bucket.grads.nbytes * bucket.splits_grads
        at_once = 2 if self.settings.overlap_grad_reduce or self.settings.overlap_param_gather else 1
        pairs = [sum(list(units.values())[i : i + at_once]) for i in range(len(units))]
        return shards | ({"units whole": max(pairs)} if max(pairs, default=0) else {})

    def reading(self, parameters: Iterable[nn.Parameter]) -> Iterator[nn.Parameter]:
        """Yield each of ``parameters`` while its weights are whole and up to date; stage 3 gathers one unit at a time.

        All ranks must pass the same parameters of their stages.
        """
        with ExitStack() as stack:
            # One unit at a time, because a reader, such as a checkpoint, visits all of them.
            active: tuple[int, int] | None = None
            for parameter in parameters:
                bucket = self._bucket_of.get(parameter)
                if bucket is not None and bucket.splits_weights:
                    if (bucket.stage, bucket.unit) != active:
                        # The unit before is freed first, so that two whole units are never in memory.
                        stack.close()
                    active = bucket.stage, bucket.unit
                stack.enter_context(self.gathered([parameter]))
                yield parameter

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Keep the weights of ``parameters`` whole and up to date inside the context, in which no step is possible.

        All ranks must pass the same parameters of their stages.
        """
        self.finish_param_sync()
        touched = dict.fromkeys(self._bucket_of[p] for p in parameters if p in self._bucket_of)
        pinned = [bucket for bucket in touched if bucket.splits_weights]
        with ExitStack() as stack:
            for stage, sync in self._sync.items():
                of_stage = [bucket for bucket in pinned if bucket.stage == stage]
                stack.callback(sync.unpin, of_stage, sync.pin(of_stage))
            for bucket in pinned:
                bucket.gather_exactly()
            yield

    def bucket_of(self, parameter: nn.Parameter) -> Bucket | None:
        """Return the bucket of ``parameter``; None for frozen parameters that are whole on every rank."""
        return self._bucket_of.get(parameter)

    def frozen_on_first_copy(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of ``frozen`` for which this rank is the first data-parallel rank with a copy."""
        axes = [(pair, "-".join(spec_of(pair[1]).replica_axes)) for pair in self.frozen]
        return [pair for pair, names in axes if self.groups.group(names).rank() == 0]

    def _announce_collective(
        self, verb: str, buckets: Sequence[Bucket], purpose: str, detail: Sequence[int]
    ) -> Announced:
        """Called before a collective of ``buckets``; all ranks run the same modules, so that there is nothing to do."""
        return Done()

    def _gradient_memory(self, bucket: Bucket, parameter: nn.Parameter) -> torch.Tensor:
        """Return the memory to which a gradient of autograd is added."""
        bucket.open_grads()
        return parameter.main_grad

    def _opener(self, bucket: Bucket) -> Callable[[], None]:
        def open_grad() -> None:
            self._sync[bucket.stage].opened(bucket)
            bucket.open_grads()

        return open_grad

    def _accumulator(self, bucket: Bucket):
        def accumulate(parameter: nn.Parameter) -> None:
            # Linear layers add to main_grad themselves and leave grad None; the hook still runs.
            if parameter.grad is not None:
                if self.settings.arithmetic.adds_exactly:
                    raise LayoutError(
                        f"layout_invariant=True: the gradient of {bucket.name_of(parameter)} is not an exact sum; "
                        "remove --layout-invariant, or compute it with functions of features.equal_bits"
                    )
                gradient = self._gradient_memory(bucket, parameter)
                # Detached: with create_graph=True a gradient has a graph of its own.
                gradient.add_(parameter.grad.detach(), alpha=self.grad_factor)
                # Freed at once: autograd's gradients of a stage would take as much memory as the buffer.
                parameter.grad = None
            if bucket in self._waiting:
                self._waiting[bucket].discard(parameter)
                self._reduce_ready(bucket.stage)

        return accumulate


def wait_before_forward(
    root: nn.Module,
    units: Sequence[Sequence[nn.Module]],
    bucket_of: Mapping[nn.Parameter, Bucket],
    finish_all: Callable[[], None],
    *,
    at_root: Sequence[Bucket],
) -> Iterator[RemovableHandle]:
    """Wait for a unit's weights when any of its modules is called first: the other modules may never be called.

    ``at_root`` are buckets that the root's forward waits for. ``state_dict()`` waits for all, by ``finish_all()``.
    """
    for module in root.modules():
        yield module.register_state_dict_pre_hook(lambda *_: finish_all())
    if at_root:
        yield root.register_forward_pre_hook(_waiter(at_root), prepend=True)
    for modules in units:
        read = [bucket_of[p] for module in modules for p in module.parameters() if p in bucket_of]
        for module in dict.fromkeys(inner for outer in modules for inner in outside_of_graphs(outer)):
            if module in modules or next(module.parameters(recurse=False), None) is not None:
                wait = _waiter(list(dict.fromkeys(read)))
                yield module.register_forward_pre_hook(wait, prepend=True)


def _waiter(buckets: Sequence[Bucket]) -> Callable[[nn.Module, object], None]:
    def wait(module: nn.Module, args: object) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait
