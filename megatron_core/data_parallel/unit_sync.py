"""ZeRO stages 2 and 3 on the units of a stage (Rajbhandari et al. 2020, section 5; Zhao et al. 2023, section 3).

A unit is gathered when its forward begins, freed when the forward of the next unit begins, gathered again when its
backward begins, and freed when the backward of the previous unit begins; then its gradients are reduced, too. The
active units are the only state and determine the memory, so hooks may run any number of times, and recomputed forwards
may run inside a backward.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.data_parallel.fill import Announced, Unit, buckets_of_unit, sharded_weights, tensors_in
from megatron_core.data_parallel.settings import DataParallelSettings
from megatron_core.data_parallel.unit_weights import UnitWeights
from megatron_core.errors import ConfigError
from megatron_core.parallel.compiled import outside_of_graphs
from megatron_core.parallel.handles import Done


class UnitSync(UnitWeights):
    """Gathers weights and reduces gradients of one pipeline stage, unit by unit, during forward and backward.

    ``reduce(bucket)`` starts to sum a bucket's gradients. In a backward each unit is reduced once, in the order of
    ``order``: when the backward leaves a unit, it and all units before it are reduced, at its end the others. A
    gradient that arrives after the sum of its unit waits for the next backward, or the end of the step.
    ``announce(verb, buckets, purpose, detail)`` compares what the ranks are about to do.
    """

    # The order is fixed, and a unit without gradients adds zeros, because ranks may run different units: each rank
    # must start the same collectives in the same order.

    def __init__(
        self,
        root: nn.Module,
        modules: Sequence[Sequence[nn.Module]],
        buckets: Sequence[Bucket],
        bucket_of: Mapping[nn.Parameter, Bucket],
        settings: DataParallelSettings,
        reduce: Callable[[Bucket], None],
        announce: Callable[[str, Sequence[Bucket], str, Sequence[int]], Announced],
        *,
        has_rest: bool = False,
    ) -> None:
        """``has_rest``: unit 0 consists of all parameters outside ``modules``, and is reduced after each backward."""
        self.settings = settings
        self._start_reduce = reduce
        self._announce = announce
        outer_buckets = [bucket for bucket in buckets if bucket.unit == 0] if has_rest else []
        outer_reads = sharded_weights(outer_buckets)
        self._rest = Unit(0, outer_buckets, outer_reads) if has_rest else None
        self.units = [] if self._rest is None else [self._rest]
        for number, unit_modules in enumerate(modules, start=len(self.units)):
            own_buckets, reads = buckets_of_unit(number, unit_modules, buckets, bucket_of)
            self.units.append(Unit(number, own_buckets, list(dict.fromkeys(outer_reads + reads))))
        self.order = list(reversed(self.units))
        """The units in the order in which their gradients are summed, equal on all ranks; first the reverse of the
        order of registration, later that in which the first rank's backward left them (``follow``)."""
        self._unreduced: list[Unit] | None = None
        """Units of ``order`` whose sums have not started in this backward; None: it sums units when it leaves them."""
        self._is_first_sum = True
        self._left: dict[Unit, None] = {}
        """Units in the order in which the last whole backward left them."""
        self._splits_weights = any(unit.reads for unit in self.units)
        self._forward: Unit | None = None
        self._backward: Unit | None = None
        self._around_forward: tuple[Unit, ...] = ()
        """Units with a module that has called the one in ``_forward``, and continues after it."""
        self._around_backward: tuple[Unit, ...] = ()
        self._weights: Unit | None = None
        """Unit whose weight gradients a split backward computes."""
        self._entered: Unit | None = None
        """Last unit of the most recent forward."""
        self._passed: int | None = None
        """Number of the last active unit other than the rest, in the current direction."""
        self._kind = "B"
        self._whole: list[Bucket] = []
        self._pinned: list[Bucket] = []
        self._reducing: list[Bucket] = []
        self._announced: Announced = Done()
        """The announcement of the sums in ``_reducing``."""
        self._next_sums: list[int] = []
        """Number of unreduced units, and the units that the backward leaves now, if it is about to enter another."""
        self._has_announced_sums = False
        """Whether a gather has announced these sums, too."""
        self._inside = Counter[Unit]()
        """Number of running forwards of modules of each unit."""
        self.on_reduced: Callable[[Bucket], None] | None = None
        """Called in the last backward of a step when the gradients of a bucket have been reduced."""
        self.hooks: list[RemovableHandle] = []
        self._attach(root, modules)

    def _attach(self, root: nn.Module, modules: Sequence[Sequence[nn.Module]]) -> None:
        """Register hooks on each unit's modules and their submodules with parameters: a model may call only
        submodules.
        """
        # A module that several units contain belongs to the first.
        seen = {root}
        for unit, listed in zip(self.units[len(self.units) - len(modules) :], modules, strict=True):
            for module in listed:
                for inner in outside_of_graphs(module):
                    # Modules without parameters of their own read no weights.
                    owns = inner is module or next(inner.parameters(recurse=False), None) is not None
                    if owns and inner not in seen:
                        seen.add(inner)
                        self._attach_module(inner, unit)
        if self._rest is not None:
            enter = root.register_forward_pre_hook(lambda *_: self._enter_forward(self._rest), prepend=True)
            self.hooks.append(enter)
            for inner in outside_of_graphs(root):
                if inner not in seen and next(inner.parameters(recurse=False), None) is not None:
                    self._attach_module(inner, self._rest)
        self.hooks.append(root.register_forward_hook(lambda _, args, output: self._leave_forward(output)))

    def _attach_module(self, module: nn.Module, unit: Unit) -> None:
        # Before hooks of the program, which may compute weights (``weight_norm``).
        self.hooks.append(module.register_forward_pre_hook(lambda *_: self._enter_module(unit), prepend=True))
        self.hooks.append(module.register_forward_hook(lambda _, args, output: self._leave_module(output, unit)))

    # Forward.

    def _enter_forward(self, unit: Unit) -> None:
        around = self._around(unit)
        if self._forward is not unit or self._around_forward != around:
            self._forward = self._entered = unit
            self._around_forward = around
            self._passed = self._passed if unit is self._rest else unit.number
            self._hold()

    def _enter_module(self, unit: Unit) -> None:
        self._enter_forward(unit)
        if not self._inside[unit]:
            self._open(unit)
        self._inside[unit] += 1

    def _leave_module(self, output: Any, unit: Unit) -> None:
        self._watch(output, unit)
        self._inside[unit] = max(self._inside[unit] - 1, 0)
        if not self._inside[unit]:
            self._close(unit)

    def _around(self, unit: Unit) -> tuple[Unit, ...]:
        """The other units of which a module is running: it has called a module of ``unit``."""
        return tuple(other for other, count in self._inside.items() if count > 0 and other not in (unit, self._rest))

    def _leave_forward(self, output: Any) -> None:
        """End the stage's forward; operations after the last module's forward, such as the loss, belong to the last
        unit.
        """
        if self._entered is not None:
            self._watch(output, self._entered, begins=True)
        self._forward = self._passed = None
        self._around_forward = ()
        self._inside.clear()
        self._hold()

    def _watch(self, output: Any, unit: Unit, *, begins: bool = False) -> None:
        """Enter the unit's backward when the gradient of one of its outputs is known.

        ``begins``: only if the backward has entered no unit yet. A model may return tensors from its middle, such as
        a cache of keys, and their unit must not be left before its end.
        """
        around = self._around(unit)

        def enter(gradient: object) -> None:
            if not begins or self._backward is None or self._unreduced is None:
                self._enter_backward(unit, around)

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(enter)

    # Backward.

    def begin(self, backward_kind: str, *, reduces: bool = True) -> None:
        """Set the kind of the next backward: whole (B), input gradients only (I), or weight gradients only (W).

        ``reduces``: whether a whole backward sums gradients; all ranks have the same number of such backwards.
        """
        self._kind = backward_kind
        if backward_kind == "B" or (backward_kind == "W" and self.settings.ranks_may_differ):
            self._unreduced = list(self.order) if reduces else []
            self._is_first_sum = True
            self._left.clear()
        elif backward_kind == "I":  # only the rank itself knows which gradients I computes: they wait for W
            self._unreduced = [] if self.settings.ranks_may_differ else None
        self._inside.clear()  # the last forward may have failed

    def end(self) -> None:
        """End a forward or backward of the stage."""
        ran_backward = self._backward is not None or self._weights is not None
        for unit in reversed(self.units):
            if unit in (self._backward, self._weights, *self._around_backward) or (unit is self._rest and ran_backward):
                self._reduce(unit)
        if self._kind != "F" and self._unreduced is not None:
            # Units that this rank has not run add zeros, because other ranks wait for the sum.
            while self._unreduced:
                self._reduce_now(self._unreduced.pop(0))
            self._unreduced = None
        self._forward = self._backward = self._weights = self._passed = None
        self._around_forward = self._around_backward = ()
        self._inside.clear()
        self._kind = "B"
        self._hold()
        if self._splits_weights:
            for bucket in (bucket for unit in self.units for bucket in unit.own):
                bucket.finish_gather()  # frees shards that were read for a unit that did not run

    def _enter_backward(self, unit: Unit, around: tuple[Unit, ...]) -> None:
        # Autograd enables gradients in a backward with create_graph=True.
        if self._splits_weights and torch.is_grad_enabled() and not self.settings.keep_after_forward:
            raise ConfigError(
                "create_graph=True at zero_stage=3: the first backward frees the weights that a second one reads; set "
                "zero3_keep_after_forward=True, or zero_stage=2"
            )
        before = self._backward
        around_before = self._around_backward
        self._backward = unit
        self._around_backward = around
        # A unit has several outputs and modules, each with a hook.
        if before is unit and around == around_before:
            return
        # The recomputed forward of the previous unit is over; it may have ended inside of a module.
        self._forward = None
        self._around_forward = ()
        self._inside.clear()
        if before is None:
            self._passed = None
        # The remaining modules run between other units and are not part of the order in which units are prefetched.
        self._passed = self._passed if unit is self._rest else unit.number
        units_left = [
            left
            for left in dict.fromkeys((before, *around_before))
            if left is not None and left not in (self._rest, unit, *around)
        ]
        # An announcement of a gather here is also that of the sums that follow.
        self._next_sums = [len(self._unreduced or ()), *(left.number for left in units_left)]
        self._has_announced_sums = False
        self._hold()
        self._open(unit)
        for left in units_left:
            self._reduce(left)
        self._next_sums = []
        self._has_announced_sums = False

    def opened(self, bucket: Bucket) -> None:
        """Called before a gradient of ``bucket`` is computed; in W it identifies the active unit."""
        if self._kind == "W" and bucket in (unit := self.units[bucket.unit]).own and self._weights is not unit:
            # W computes the gradients of one unit after the other, so the next unit completes the one before.
            if self._weights is not None:
                self._reduce(self._weights)
            self._weights = unit

    def _reduce(self, unit: Unit) -> None:
        """Reduce the gradients of a unit that a backward leaves, after those of the units before it in ``order``."""
        self._left.setdefault(unit)
        if self._unreduced is None:
            self._reduce_now(unit)
        while self._unreduced and unit in self._unreduced:
            self._reduce_now(self._unreduced.pop(0))

    def _reduce_now(self, unit: Unit) -> None:
        """Start to reduce a unit's gradients; with an order of units all buckets, so that ranks agree on the list.

        Compressed sums are started elsewhere, once per step.
        """
        self.finish_reduce()
        split = [bucket for bucket in unit.own if bucket.splits_grads and not bucket.compresses]
        sums_all = self._kind == "B" or self._unreduced is not None
        buckets = [bucket for bucket in split if sums_all or bucket.has_grads]
        if not buckets:
            return
        # At stage 2 the first sum of a backward determines all others; at stage 3 gathers are between them.
        needs_announcement = self._splits_weights or self._unreduced is None or self._is_first_sum
        if needs_announcement and not self._has_announced_sums:
            self._announced = self._announce("sums the gradients of", buckets, "", ())
        self._is_first_sum = False
        for bucket in buckets:
            self._start_reduce(bucket)
            self._reducing.append(bucket)
        if not self.settings.overlap_grad_reduce:
            self.finish_reduce()

    def finish_reduce(self) -> None:
        """Wait for the pending reductions."""
        self._announced.wait()
        while self._reducing:
            bucket = self._reducing.pop(0)
            bucket.finish_reduce()
            if self.on_reduced is not None:
                self.on_reduced(bucket)

    def positions(self) -> list[int]:
        """Return for each unit its position, from 1, in the order in which the last backward left them, else 0."""
        left = [*self._left]
        return [left.index(unit) + 1 if unit in self._left else 0 for unit in self.units]

    def follow(self, positions: Sequence[int]) -> None:
        """Set ``order`` by the ``positions`` of a rank: units that it ran exchange places, the others keep theirs."""
        ran = sorted((unit for unit in self.units if positions[unit.number]), key=lambda unit: positions[unit.number])
        following = iter(ran)
        self.order = [next(following) if positions[unit.number] else unit for unit in self.order]
