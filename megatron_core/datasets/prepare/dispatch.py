"""Which part a worker makes next.

Parts go out in order as long as their number is known. A compressed file is a stream, so a worker that has begun one
stays with it while others take the files behind it; when no file is left to begin, they help with the earliest: each
reads the whole stream and makes the parts that it is given.
"""

from collections.abc import Sequence

from megatron_core.datasets.prepare.parts import Group


class Dispatcher:
    """Hands out the parts of the groups, and knows which are made and not yet joined.

    position: group and index of the part to be joined next. ahead: the most parts given out and not yet joined.
    """

    def __init__(self, groups: Sequence[Group], position: tuple[int, int], ahead: int) -> None:
        self._groups = groups
        self._ahead = ahead
        self.position = position
        self._made: dict[tuple[int, int], bool] = {}
        self._ended: dict[int, int] = {}
        # Of each group that still has parts to give out, the next one.
        self._next: dict[int, int] = {}
        self._unopened = position[0]
        self._lanes: dict[int, int] = {}
        self._given = 0

    @property
    def finished(self) -> bool:
        """Whether all parts are joined."""
        return self.position[0] >= len(self._groups)

    def found(self, group: int, index: int, last: bool) -> None:
        """Note a part that was made, now or by an earlier run."""
        if (group, index) < self.position:
            return
        self._made[group, index] = last
        if last and self._groups[group].parts is None:
            # Workers that share a stream may have gone for parts behind its end.
            self._ended[group] = min(index + 1, self._ended.get(group, index + 1))

    def returned(self) -> None:
        """Note that a worker has done what `take` gave it."""
        self._given -= 1

    def ready(self) -> bool:
        """Whether the part at `position` is made."""
        return self.position in self._made

    def pop(self) -> tuple[int, int, bool]:
        """Group, index and lastness (by its maker's word) of the part at `position`; `position` goes on."""
        group, index = self.position
        last = self._made.pop(self.position)
        end = self._end(group)
        if end is None or index + 1 < end:
            self.position = (group, index + 1)
        else:
            self.position = (group + 1, 0)
            self._unopened = max(self._unopened, group + 1)
            self._next.pop(group, None)
            self._ended.pop(group, None)
            self._made = {key: value for key, value in self._made.items() if key >= self.position}
        return group, index, last

    def take(self, worker: int) -> tuple[int, int] | None:
        """Group and index of the next part for the worker; None if there is nothing to do for it now."""
        group, index = self.position
        if self._given + len(self._made) >= self._ahead:
            # Only what the joining waits for.
            if group == self._unopened:
                self._open()
            return self._give(group) if self._next.get(group, 0) < index + self._ahead else None
        candidates = [self._lanes.get(worker, -1)]
        candidates += [group for group in sorted(self._next) if self._groups[group].parts is not None]
        for group in candidates:
            if found := self._give(group):
                return found
        while self._unopened < len(self._groups):
            if found := self._enter(worker, self._open()):
                return found
        return next((found for group in sorted(self._next) if (found := self._enter(worker, group))), None)

    def _open(self) -> int:
        self._next[self._unopened] = 0
        self._unopened += 1
        return self._unopened - 1

    def _enter(self, worker: int, group: int) -> tuple[int, int] | None:
        self._lanes[worker] = group
        return self._give(group)

    def _give(self, group: int) -> tuple[int, int] | None:
        if group not in self._next:
            return None
        index = max(self._next[group], self.position[1] if group == self.position[0] else 0)
        while (group, index) in self._made:
            index += 1
        end = self._end(group)
        if end is not None and index >= end:
            del self._next[group]
            return None
        self._next[group] = index + 1
        self._given += 1
        return group, index

    def _end(self, group: int) -> int | None:
        parts = self._groups[group].parts
        return self._ended.get(group) if parts is None else parts
