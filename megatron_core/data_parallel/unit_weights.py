"""Whole weights of ZeRO stage 3: units that run are gathered, and the others are freed."""

from collections import Counter
from collections.abc import Callable, Sequence

from megatron_core.data_parallel.awaited_parameter import Arrival
from megatron_core.data_parallel.buffer import Bucket
from megatron_core.data_parallel.fill import Announced, Unit
from megatron_core.data_parallel.settings import DataParallelSettings


class UnitWeights:
    """Gathers and frees the weights of units; a part of ``UnitSync``, which says which units run."""

    settings: DataParallelSettings
    units: list[Unit]
    _rest: Unit | None
    _announce: Callable[[str, Sequence[Bucket], str, Sequence[int]], Announced]
    _splits_weights: bool
    _forward: Unit | None
    _backward: Unit | None
    _around_forward: tuple[Unit, ...]
    _around_backward: tuple[Unit, ...]
    _passed: int | None
    _whole: list[Bucket]
    _pinned: list[Bucket]
    _announced: Announced
    _next_sums: list[int]
    _has_announced_sums: bool
    _inside: Counter[Unit]

    def release(self) -> None:
        """Free all weights before the shards are updated."""
        self._forward = self._backward = None
        self._around_forward = self._around_backward = ()
        self._release_all_but([])

    def _hold(self) -> None:
        """Gather the weights of the active units, with overlap start those of the next unit, and free the others."""
        if not self._splits_weights:
            return
        now = self._active()
        overlaps = self.settings.overlap_param_gather
        following = self._ahead(1) if overlaps else []
        # Freed before others are gathered, so that memory is free for them.
        if not self.settings.keep_after_forward:
            self._release_all_but(now + following)
        # The active units first: their messages are needed first.
        self._gather(now)
        self._gather(following)
        for bucket in now:
            bucket.finish_gather()
        # A shard in host memory or on disk needs a step more than the gather that reads it.
        for bucket in self._ahead(1 + overlaps):
            bucket.prefetch_weights()

    def _gather(self, buckets: Sequence[Bucket]) -> None:
        """Start to gather those of ``buckets`` that are not whole."""
        missing = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self._whole]
        if not missing:
            return
        reader = "a forward" if self._backward is None else "a backward"
        announced = self._announce("gathers", missing, f" for {reader}" if self._at_work() else "", self._next_sums)
        if self._next_sums:
            self._announced = announced
            self._has_announced_sums = True
        for bucket in missing:
            bucket.start_gather()
            bucket.gathering = Arrival(bucket.gathering, before=announced.wait)
        self._whole += missing

    def _open(self, unit: Unit) -> None:
        """Allow reads of the unit's weights."""
        for bucket in unit.reads if self._splits_weights else ():
            if bucket.is_whole:
                bucket.freed.restore()

    def _close(self, unit: Unit) -> None:
        """Refuse further reads of a unit's weights in this forward: its backward would not keep them for their readers.

        The parameters outside of all units are whole in all backwards.
        """
        if self._rest in (None, unit) or self._backward is not None or self.settings.keep_after_forward:
            return
        active = [other for other, count in self._inside.items() if count > 0]
        needed = [bucket for other in active for bucket in other.reads] + self._pinned
        for bucket in unit.own:
            if bucket.splits_weights and bucket in self._whole and bucket not in needed:
                bucket.freed.close()

    def pin(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        """Gather ``buckets`` and keep them whole until ``unpin``; return the buckets that were not whole."""
        added = [bucket for bucket in buckets if bucket not in self._whole]
        self._pinned += buckets
        self._gather(added)
        for bucket in buckets:
            bucket.finish_gather()
            bucket.freed.restore()
        for bucket in added:
            bucket.keep_for_users()  # a caller may keep tensors of the whole weights
        return added

    def unpin(self, buckets: Sequence[Bucket], added: Sequence[Bucket]) -> None:
        """End ``pin``, which returned ``added``: free these buckets unless an active unit reads them."""
        for bucket in buckets:
            self._pinned.remove(bucket)
        active = self._active()
        self._release_all_but([bucket for bucket in self._whole if bucket in active or bucket not in added])

    def _release_all_but(self, needed: list[Bucket]) -> None:
        needed = needed + self._pinned
        for bucket in self._whole:
            if bucket not in needed:
                bucket.release_weights()
        self._whole = [bucket for bucket in self._whole if bucket in needed]

    def _active(self) -> list[Bucket]:
        """The buckets that running modules read."""
        units = dict.fromkeys((*self._at_work(), *self._around_forward, *self._around_backward))
        return [bucket for unit in units for bucket in unit.reads]

    def _at_work(self) -> list[Unit]:
        units = [unit for unit in (self._forward, self._backward) if unit is not None]
        return units[:1] if len(set(units)) == 1 else units

    def _ahead(self, distance: int) -> list[Bucket]:
        """Return the buckets of the next unit, or with ``distance`` 2 of the one after it.

        The list is empty while two units are active, so that at most two units are in memory.
        """
        if len(self._at_work()) != 1:
            return []
        first = 0 if self._rest is None else 1
        backward = self._backward is not None
        passed = self._at_work()[0].number if self._rest is None else self._passed
        if passed is None:
            passed = len(self.units) if backward else first - 1
        number = passed + (-distance if backward else distance)
        return list(self.units[number].reads) if first <= number < len(self.units) else []
