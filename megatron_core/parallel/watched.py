"""The observer of collectives and of messages between pipeline stages, such as ``links.recorder``.

Without an observer, or while it is not active, a collective costs one check of an attribute more.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from megatron_core.parallel.groups import Group

Parts = Callable[[], Sequence[Tensor | None]]
"""Returns the tensor for, or from, each rank of a group; None if there is none."""


class Watched:
    """The handle of a collective that calls ``after`` once, when it is complete."""

    def __init__(self, work: Any, after: Callable[[], None]) -> None:
        self._work = work
        self._after = after
        self._done = False

    def wait(self) -> None:
        """Wait for the collective."""
        self._work.wait()
        if not self._done:
            self._done = True
            self._after()

    def is_completed(self) -> bool:
        """Whether ``wait`` would return immediately."""
        return bool(self._work.is_completed())


class Observer(Protocol):
    """Wraps the calls of collectives, and sends and receives messages in its own format."""

    @property
    def active(self) -> bool:
        """Whether it wraps collectives."""

    @property
    def sealing(self) -> bool:
        """Whether it sends and receives messages in its own format."""

    @property
    def watches_messages(self) -> bool:
        """Whether it changes received messages, or their format."""

    def moved(
        self, call: Callable[[], Any], what: str, group: Group, x: Tensor, to_each: Parts, from_each: Parts
    ) -> Callable[[], Any]:
        """Wrap the ``call`` of a collective that moves data; ``x``: the tensor by which messages describe it."""

    def summed(
        self, call: Callable[[], Any], what: str, group: Group, x: Tensor, result: Tensor, maximum: bool
    ) -> Callable[[], Any]:
        """Wrap a reduction of ``x`` whose ``result`` is all of it or this rank's part."""

    def message(self, tensor: Tensor, sender: int, receiver: int) -> Tensor:
        """The message to send instead of ``tensor``, if ``sealing``."""

    def receive(self, buffer: Tensor, sender: int, receiver: int, start: Callable[[Tensor], Any]) -> Watched:
        """Receive a message into ``buffer``; ``start`` starts to receive into a tensor."""


class Observation:
    """The observer of this process, if there is one."""

    def __init__(self) -> None:
        self.observer: Observer | None = None


OBSERVATION = Observation()


def watched_move(
    call: Callable[[], Any], what: str, group: Group, x: Tensor, to_each: Parts, from_each: Parts
) -> Callable[[], Any]:
    """``Observer.moved``, or ``call`` itself without an active observer."""
    observer = OBSERVATION.observer
    if observer is None or not observer.active:
        return call
    return observer.moved(call, what, group, x, to_each, from_each)


def watched_sum(
    call: Callable[[], Any], what: str, group: Group, x: Tensor, result: Tensor, *, maximum: bool = False
) -> Callable[[], Any]:
    """``Observer.summed``, or ``call`` itself without an active observer."""
    observer = OBSERVATION.observer
    if observer is None or not observer.active:
        return call
    return observer.summed(call, what, group, x, result, maximum)
