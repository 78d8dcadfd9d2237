"""Data parallelism whose ranks may run different modules: each announces what it sums or gathers, and when.

A collective of torch.distributed has no name. If two ranks run different units of a model, the sum of one layer's
gradients meets the sum of another layer's: with equal sizes the result is silently wrong, with unequal sizes some
transports abort and others wait. An announcement is an all-reduce of two integers over a group of its own, so it
neither depends on the transport of the collective nor on its size, and it meets only other announcements.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.data_parallel import BucketMemory, DataParallel, DataParallelSettings
from megatron_core.data_parallel.buffer import Bucket
from megatron_core.data_parallel.compressor import Compressor
from megatron_core.data_parallel.fill import Announced
from megatron_core.data_parallel.unit_sync import UnitSync
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.collectives import all_reduce_, reduce_scatter_flat_
from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.parallel.groups import Group, LocalGroup, ParallelGroups, process_group
from megatron_core.parallel.texts import gather_strings, listed

AHEAD = 8
"""Upper bound on the number of announcements that a rank has made and not yet compared."""


class Announcement:
    """One announcement; ``wait`` compares it with those of the other ranks."""

    def __init__(self, what: str, number: int, values: torch.Tensor, work: Any, compare: Callable[[int], None]) -> None:
        self.what = what
        self.number = number
        self._values = values
        self._work = work
        self._compare = compare

    def wait(self) -> None:
        """Wait for the other ranks; ``LayoutError`` on all of them if this or an earlier announcement differs."""
        self._compare(self.number)

    def is_equal(self) -> bool:
        """Wait for the other ranks, and return whether all have announced the same."""
        self._work.wait()
        highest, lowest = self._values.tolist()
        return bool(highest == -lowest)


class Announcements:
    """The announcements of one rank over ``group``, which is used for nothing else."""

    def __init__(self, group: Group, advice: str) -> None:
        """``advice``: the end of the error message, with the fix."""
        self.group = group
        self._advice = advice
        self._pending: deque[Announcement] = deque()
        """Announcements that have not been compared, in order."""
        self._count = 0

    def announce(self, what: str, detail: Iterable[int] = ()) -> Announcement:
        """Announce a collective: ``what`` for readers ("gathers layers.0"), and a ``detail`` that must be equal, too.

        Wait for the result before the collective's own result is used.
        """
        # A bound, because a rank that fails makes this many empty announcements, so that all ranks have made equally
        # many.
        if len(self._pending) == AHEAD:
            self._pending[0].wait()
        return self._make(what, detail)

    def _make(self, what: str, detail: Iterable[int] = ()) -> Announcement:
        code = int.from_bytes(blake2b(f"{what} {(*detail,)}".encode(), digest_size=7).digest(), "little")
        # The maximum of -code is minus the minimum: one all-reduce compares all ranks.
        values = torch.tensor([code, -code])
        group = process_group(self.group)
        RECORDER.note(f"announcement ({what})", group, values)
        work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)
        self._count += 1
        announcement = Announcement(what, self._count, values, work, self._compare)
        self._pending.append(announcement)
        return announcement

    def _compare(self, number: int) -> None:
        """Compare the announcements up to ``number`` in order: all ranks must fail at the same one."""
        while self._pending and self._pending[0].number <= number:
            announcement = self._pending.popleft()
            if not announcement.is_equal():
                self._fail(announcement)

    def _fail(self, announcement: Announcement) -> None:
        """Raise the error about ``announcement``, after all ranks have made the same number of announcements."""
        while self._count < announcement.number + AHEAD:
            self._make("nothing")
        while self._pending:
            self._pending.popleft().is_equal()
        # The texts are sent only now: usually a number of 7 bytes is compared.
        texts = gather_strings(announcement.what, self.group, torch.device("cpu"))
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, text in zip(dist.get_process_group_ranks(process_group(self.group)), texts, strict=True):
            ranks_of[text].append(rank)
        by_rank = "; ".join(f"{_subject(ranks)} {text}" for text, ranks in ranks_of.items())
        raise LayoutError(f"the ranks do not run the same units in the same order: {by_rank}. {self._advice}")


def _subject(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"each of the ranks {listed(ranks)}"


FIX = (
    "All ranks must call forward, backward, step and zero_grad of an engine equally often, and evaluate together; or "
    "set zero_stage=0"
)
FIX_UNITS = (
    "Add to unit_classes the class of a module that contains these units and that all ranks run (the class of the "
    "model itself keeps all weights in memory during a forward and backward), or set zero_stage=2"
)


class Agreement:
    """Announces the sums and gathers of one rank, and agrees with the others at the end of each step.

    Ranks start sums in one order, whatever modules they run, so a gradient may arrive after the sum of its bucket has
    started: a module ran again, or a program called backward twice. Such late gradients are added to a separate
    buffer, or at stages 2 and 3 stay in the bucket. At the end of the step the ranks exchange the list of their
    buckets with late gradients, and all of them sum these again.
    """

    def __init__(self, control: Group, sums: Group, unit_names: Mapping[tuple[int, int], str], zero_stage: int) -> None:
        """``control``: a group for announcements only, of the ranks in ``sums``, the group of the collectives.

        ``unit_names``: by stage and number of the unit.
        """
        # gloo ends the process if messages differ in size, and simulated worlds the rank: compare before they are sent.
        # Shared memory and NCCL wait, so that the comparison need not be a meeting of its own.
        self._compares_first = process_group(sums).name() not in ("shm", "nccl")
        advice = FIX_UNITS if zero_stage == 3 else FIX
        self._announcements = Announcements(control, advice)
        self._unit_names = unit_names
        self.late: dict[Bucket, Tensor] = {}
        """Late gradients of buckets that are summed once in a step."""
        self.step = 1
        """Number of the current step."""
        self.discards = 0
        """How often gradients have been discarded in this step."""

    def announce(self, verb: str, buckets: Sequence[Bucket], purpose: str, detail: Sequence[int]) -> Announcement:
        """Announce a sum or gather of ``buckets``; readers see ``verb``, the names of the units, and ``purpose``."""
        units = dict.fromkeys(self._unit_names[bucket.stage, bucket.unit] for bucket in buckets)
        if torch._C._are_functorch_transforms_active():
            raise ConfigError(
                f"a transform of torch.func {verb} {listed([*units])}, but ranks cannot exchange the tensors of a "
                "transform, which have no memory; use torch.autograd.grad or torch.autograd.functional.jacobian, or "
                "zero_stage=2, with which jacrev and vmap run"
            )
        of_buckets = [number for bucket in buckets for number in (bucket.stage, bucket.unit, bucket.weights.numel())]
        # The step is a part of the text: a rank that is one step behind announces the same units.
        text = f"{verb} {listed([*units])}{purpose} in step {self.step}"
        announcement = self._announcements.announce(text, (*of_buckets, *detail))
        if self._compares_first:
            announcement.wait()
        return announcement

    def late_gradient(self, bucket: Bucket, parameter: nn.Parameter) -> Tensor:
        """Return the memory for a gradient that arrives after the sum of ``bucket`` has started."""
        # Allocated only when a gradient is late, which is rare.
        if bucket not in self.late:
            self.late[bucket] = torch.zeros_like(bucket.grads)
        gradient: Tensor = parameter.main_grad
        return self.late[bucket].as_strided(gradient.shape, gradient.stride(), gradient.storage_offset())

    def end_step(self, buckets: Sequence[Bucket], stages: Iterable[UnitSync]) -> set[Bucket]:
        """Return the buckets with late gradients on any rank; all ranks then follow the first rank's order of units."""
        discarded = f" after zero_grad() x {self.discards}" if self.discards else ""
        self._announcements.announce(f"ends step {self.step}{discarded}").wait()
        # A maximum over the ranks: a bucket is summed again on all ranks if it is late on any.
        flags = [int(bucket in self.late or (bucket.splits_grads and bucket.has_grads)) for bucket in buckets]
        # One rank's order for all: any is right, as long as it is the same.
        is_first = self._announcements.group.rank() == 0
        orders = [sync.positions() if is_first else [0] * len(sync.units) for sync in stages]
        values = torch.tensor(flags + [position for order in orders for position in order])
        group = process_group(self._announcements.group)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
        agreed: list[int] = values.tolist()
        start = len(buckets)
        for sync in stages:
            sync.follow(agreed[start : start + len(sync.units)])
            start += len(sync.units)
        self.step += 1
        self.discards = 0
        return {bucket for bucket, is_late in zip(buckets, agreed, strict=False) if is_late}

    def add_late(self, bucket: Bucket) -> None:
        """Sum the late gradients of ``bucket`` over the ranks, and add them to the complete sum."""
        late = self.late.pop(bucket, None)
        late = torch.zeros_like(bucket.grads) if late is None else late
        if bucket.is_sharded:
            late_shard = late.new_empty(bucket.sum_shard.shape)
            reduce_scatter_flat_(late_shard, late, bucket.dp_group)
        else:
            late_shard = late
            all_reduce_(late_shard, bucket.dp_group)
        bucket.sum_shard.add_(late_shard)


def name_units(module: nn.Module, units: Sequence[Sequence[nn.Module]], *, has_rest: bool) -> Iterable[tuple[int, str]]:
    """Yield the number of each unit of a stage, as in ``units_of``, and the names of its modules."""
    if has_rest:
        yield 0, "the parameters outside of all units"
    name_of = {inner: name for name, inner in module.named_modules()}
    for number, modules in enumerate(units, start=int(has_rest)):
        yield number, ", ".join(name_of.get(inner) or "the model" for inner in modules)


class AgreeingDataParallel(DataParallel):
    """Gradients of a module of the user's own, of which ranks may run different parts; see ``Agreement``."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        groups: ParallelGroups,
        settings: DataParallelSettings,
        *,
        memory: BucketMemory | None = None,
        compressor: Compressor | None = None,
        units: Mapping[int, list[list[nn.Module]]] | None = None,
    ) -> None:
        settings = replace(settings, ranks_may_differ=True)
        super().__init__(stages, groups, settings, memory=memory, compressor=compressor, units=units)
        self.is_given_back = False
        self._agreement = self._agree(stages)

    def _agree(self, stages: Mapping[int, nn.Module]) -> Agreement | None:
        sums = self.groups.shard_group("dp-cp")
        sums_early = self.settings.zero_stage >= 2 or self.settings.overlap_grad_reduce
        if isinstance(sums, LocalGroup) or sums.size() == 1 or not sums_early:
            return None  # all sums run at the end of a step, in one order
        several = len(self.groups.ranks("pp")) > 1
        named: dict[tuple[int, int], str] = {}
        for stage, module in stages.items():
            for number, name in name_units(module, self._units[stage], has_rest=self._has_rest):
                named[stage, number] = f"{name} of stage {stage}" if several else name
        # A communicator of its own: announcements must not wait for, or be mistaken for, collectives of the training.
        # NCCL has no CPU tensors, and a kernel for a few bytes would wait behind the computation in its stream.
        backend = "gloo" if dist.get_backend() == "nccl" else None
        (control,) = self.groups.make_neighbour_groups("dp-cp", [sums.size()], backend).values()
        return Agreement(control, sums, named, self.settings.zero_stage)

    def keep_hooks_out_of_graphs(self) -> None:
        """Let a later ``torch.compile`` of the module call the hooks of units instead of tracing their collectives."""
        for sync in self._sync.values():
            for name in ("_enter_module", "_leave_module", "_enter_forward", "_leave_forward"):
                setattr(sync, name, torch.compiler.disable(getattr(sync, name)))

    @torch.no_grad()
    def give_back(self) -> None:
        """Leave the module as a module of torch, with whole weights and without hooks; on all ranks together."""
        split = [bucket for bucket in self.all_buckets if bucket.splits_weights]
        parameters = [parameter for bucket in split for parameter in bucket.parameters]
        weights = [parameter.detach().clone() for parameter in self.reading(parameters)]
        self.finish_param_sync()
        self.release()
        for bucket in split:
            bucket.freed.restore()
        for parameter, whole in zip(parameters, weights, strict=True):
            parameter.data = whole
        self.is_given_back = True

    def zero_grad(self) -> None:
        """Set the gradients of all buckets to zero, for a new step."""
        if self._agreement is not None:
            self._agreement.late.clear()
        super().zero_grad()

    def count_discard(self) -> None:
        """Count a ``zero_grad`` of the program, which the ranks compare at the end of the step."""
        if self._agreement is not None:
            self._agreement.discards += 1

    def _late_buckets(self) -> set[Bucket]:
        if self._agreement is None:
            return super()._late_buckets()
        return self._agreement.end_step(self.buckets, self._sync.values())

    def _add_late(self, bucket: Bucket) -> None:
        if self._agreement is not None and self._takes_late(bucket):
            self._agreement.add_late(bucket)

    def _announce_collective(
        self, verb: str, buckets: Sequence[Bucket], purpose: str, detail: Sequence[int]
    ) -> Announced:
        if self._agreement is None:
            return super()._announce_collective(verb, buckets, purpose, detail)
        return self._agreement.announce(verb, buckets, purpose, detail)

    def _gradient_memory(self, bucket: Bucket, parameter: nn.Parameter) -> Tensor:
        # The bucket's memory holds a sum that is complete, or still in flight.
        if self._agreement is not None and self._takes_late(bucket):
            return self._agreement.late_gradient(bucket, parameter)
        return super()._gradient_memory(bucket, parameter)

    @staticmethod
    def _takes_late(bucket: Bucket) -> bool:
        """Whether gradients go to another buffer once the bucket's sum, the only one of the step, has started."""
        return bucket.reduced and bucket.dp_group.size() > 1 and (bucket.compresses or not bucket.splits_grads)
