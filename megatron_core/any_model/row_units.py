"""Units of ``fully_shard``: backwards of a program's ``loss.backward()``, and weights that it keeps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron_core.any_model.row_shards import RowBucket, ShardChoices, local_of
from megatron_core.data_parallel.fill import Unit
from megatron_core.data_parallel.settings import DataParallelSettings
from megatron_core.data_parallel.unit_sync import UnitSync
from megatron_core.errors import ConfigError
from megatron_core.parallel.handles import Done


class UnshardHandle:
    """The handle of ``unshard(async_op=True)``."""

    def __init__(self, buckets: Sequence[RowBucket]) -> None:
        self._buckets = buckets

    def wait(self) -> None:
        """Wait for the weights."""
        for bucket in self._buckets:
            bucket.finish_gather()


class RowUnits(UnitSync):
    """The units of ``root``: one for each of ``inner``, calls of ``fully_shard`` inside of it, and the rest.

    No step of an engine surrounds a forward or backward, so the first unit that a backward enters begins it, and a
    callback of autograd ends it.
    """

    def __init__(self, root: nn.Module, inner: Sequence[ShardChoices], outer: ShardChoices) -> None:
        self._choices = [outer, *inner]
        self._runs_backward = False
        self._keeps_for_backward = False
        self._buckets: list[RowBucket] = []
        for unit, choices in enumerate(self._choices):
            for dtype in dict.fromkeys(local_of(row.sharded).dtype for row in choices.rows):
                rows = [row for row in choices.rows if local_of(row.sharded).dtype == dtype]
                self._buckets.append(RowBucket(unit, rows, choices))
        buckets: Any = self._buckets  # with the methods of buckets that units call
        super().__init__(
            root,
            [choices.modules for choices in inner],
            buckets,
            {row.sharded: bucket for bucket in buckets for row in bucket.rows},
            DataParallelSettings(zero_stage=3, overlap_param_gather=True, overlap_grad_reduce=True),
            lambda bucket: bucket.start_reduce(),
            # Ranks must run the same units, as with FSDP2: comparing them costs a message for each gather.
            lambda *_: Done(),
            has_rest=True,
        )
        root.register_forward_pre_hook(lambda *_: self._begin_forward(), prepend=True)

    def unit_of(self, choices: ShardChoices) -> Unit:
        """Return the unit of a call of ``fully_shard``."""
        return self.units[self._choices.index(choices)]

    # Forwards.

    def _begin_forward(self) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward:  # else the forward is recomputed
            self._runs_backward = False  # the last backward may have failed
            self._backward = None
            self._around_backward = self._around_forward = ()
            self._inside.clear()
        self._keeps_for_backward = torch.is_grad_enabled()

    def enter_first(self, module: nn.Module) -> None:
        """Enter a forward that has begun before the hooks of the units were registered."""
        self._begin_forward()
        unit = next(unit for unit, choices in zip(self.units, self._choices, strict=True) if module in choices.modules)
        self._enter(unit)

    def begin_method(self, unit: Unit) -> bool:
        """Enter a method that a program calls instead of ``forward``; return whether no forward runs around it."""
        is_outermost = self._forward is None
        if is_outermost:
            self._begin_forward()
        self._enter(unit)
        return is_outermost

    def end_method(self, unit: Unit, output: Any, *, is_outermost: bool) -> None:
        """Leave a method that a program calls instead of ``forward``."""
        if unit is not self._rest:
            self._leave_module(output, unit)
        if is_outermost:
            self._leave_forward(output)

    def _enter(self, unit: Unit) -> None:
        if unit is self._rest:
            self._enter_forward(unit)
        else:
            self._enter_module(unit)

    # Weights that a program keeps.

    def unshard(self, choices: ShardChoices, *, wait: bool) -> UnshardHandle | None:
        """Gather the weights of a unit and keep them until its forward ends."""
        buckets = self._of(choices)
        self._pinned += [bucket for bucket in buckets if bucket not in self._pinned]
        self._gather(buckets)
        handle = UnshardHandle(buckets)
        if not wait:
            return handle
        handle.wait()
        return None

    def reshard(self, choices: ShardChoices) -> None:
        """Free the weights of a unit."""
        buckets = self._of(choices)
        self._pinned = [bucket for bucket in self._pinned if bucket not in buckets]
        self._whole = [bucket for bucket in self._whole if bucket not in buckets]
        for bucket in buckets:
            bucket.release_weights()

    def _of(self, choices: ShardChoices) -> list[Any]:
        return [bucket for bucket in self._buckets if bucket.choices is choices]

    def _close(self, unit: Unit) -> None:
        self._pinned = [bucket for bucket in self._pinned if bucket not in unit.own]

    def _release_all_but(self, needed: list[Any]) -> None:
        super()._release_all_but(needed + [bucket for bucket in self._whole if self._is_kept(bucket)])

    def _is_kept(self, bucket: Any) -> bool:
        """Whether a unit that does not run keeps its weights, between forward and backward."""
        reshards = bucket.choices.reshard_after_forward
        if reshards is None:
            # The outermost module's weights are needed as soon as a backward begins.
            return bucket.choices is self._choices[0] and self._keeps_for_backward
        return not reshards

    def _free(self) -> None:
        """Free all weights except those that stay after a backward."""
        buckets: list[Any] = self._whole
        self._pinned = []
        super()._release_all_but([bucket for bucket in buckets if not bucket.choices.reshard_after_backward])

    # Backwards.

    def _enter_backward(self, unit: Unit, around: tuple[Unit, ...]) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True with fully_shard: the first backward frees the weights that a second one reads; "
                "compute second derivatives without fully_shard"
            )
        if not self._runs_backward:
            self._runs_backward = True
            self.begin("B")
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        super()._enter_backward(unit, around)

    def _end_backward(self) -> None:
        self.end()
        # Gradients of units that ran in another order than at first: the order is that of this backward from now on.
        for unit in self.order:
            if any(bucket.has_grads for bucket in unit.own):
                self._reduce_now(unit)
        self.finish_reduce()
        self.follow(self.positions())
        for bucket in self._buckets:
            bucket.keep_gradients()
        self._runs_backward = False
        self._free()

    def reset(self) -> None:
        """Free all weights and discard gradients that have not been summed."""
        self._runs_backward = False
        self.finish_reduce()
        for bucket in self._buckets:
            for row in bucket.rows:
                row.take_gradient()
        self._pinned = []
        self._forward = self._backward = None
        self._around_forward = self._around_backward = ()
        self._inside.clear()
        self._unreduced = None
        super()._release_all_but([])
