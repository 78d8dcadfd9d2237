"""State that belongs to a rank: one value for each process, or one for each simulated rank of a process.

A process of a job is one rank. A simulated world (``cpu_ranks.simulated``) runs many ranks in one process, each in its
own threads, so all ranks would share a module-level variable. ``RankLocal`` stores such state: every rank has its own
value. Threads inherit the rank only by ``in_this_rank``; all other threads find the process's value.
"""

from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar

T = TypeVar("T")
# A process with one rank needs no context: all of its threads share these values.
_OF_THE_PROCESS: dict[Any, Any] = {}
_values: ContextVar[dict[Any, Any]] = ContextVar("values of the rank")


class RankLocal(Generic[T]):
    """A value that every rank has for itself; ``make`` creates it at its first use on a rank."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def __call__(self) -> T:
        """This rank's value."""
        values = _values.get(_OF_THE_PROCESS)
        # An exception and not a test, because the value exists in almost every call, and each collective makes some.
        try:
            return values[self]
        except KeyError:
            return values.setdefault(self, self._make())

    def set(self, value: T) -> None:
        """Replace this rank's value."""
        _values.get(_OF_THE_PROCESS)[self] = value


class Forwarding:
    """An object whose attributes are those of this rank's value, such as that of a ``RankLocal``."""

    def __init__(self, value: Callable[[], Any]) -> None:
        # The class forwards ordinary attributes to the rank's value, so its own one has to bypass that.
        object.__setattr__(self, "_value", value)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_value")(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_value")(), name, value)


def forget_rank() -> None:
    """Remove all values of this rank, such as groups that no longer exist; each is made again at its next use."""
    _values.get(_OF_THE_PROCESS).clear()


def new_rank() -> Context:
    """A context without values, for the threads of a simulated rank."""
    context = copy_context()
    context.run(_values.set, {})
    return context


def in_this_rank(function: Callable[[], T]) -> Callable[[], T]:
    """``function`` for another thread, where it runs as a part of the rank that calls this."""
    context = copy_context()
    return lambda: context.run(function)
