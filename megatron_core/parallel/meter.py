"""The meter of a rank, which collectives and the steps of a training report to; see ``reports.meter``.

Without a meter that measures, each report costs one call that does nothing.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from megatron_core.parallel.rank_local import Forwarding, RankLocal

PROCESS_BEGAN = time.time()
_BEGAN = time.monotonic()
"""Unix time when this module was loaded; time between it and the first step is counted as lost to training."""
OTHER = "other"
COMPRESSED = "compressed gradients"
"""Label of messages with gradients that are rounded or approximated."""


def unix_time() -> float:
    """Seconds since 1970; after the start of the process, changes of the system's clock have no effect."""
    return PROCESS_BEGAN + time.monotonic() - _BEGAN


class Waited:
    """The handle of a collective for which a meter measures the time of ``wait``."""

    def __init__(self, work: Any) -> None:
        self.work = work
        """The handle itself, for waits in streams other than the computation's: times are recorded in one stream."""

    def wait(self, instead: Callable[[], object] | None = None) -> None:
        """Wait for the collective, by calling ``instead`` if it is given."""
        (instead or self.work.wait)()


class NoMeter:
    """Measures nothing; ``reports.meter.Meter`` derives from it and replaces it."""

    charged: tuple[str, Any] = (OTHER, None)
    """The phase to which time is charged now, and its detail."""

    def switch(self, phase: str, detail: Any = None) -> str:
        """Charge time to ``phase`` from now on; returns the previous phase. ``detail`` is shown in a trace."""
        return phase

    def mark(self) -> int:
        """Record the current time without a change of phase; return its index."""
        return 0

    def settle(self) -> None:
        """Note that the host has just waited for the device."""

    def phase(self, name: str, *, inclusive: bool = False) -> AbstractContextManager[None]:
        """Charge the enclosed code to ``name``; with ``inclusive``, including its collectives and inner phases."""
        return nullcontext()

    def labelled(self, label: str | None) -> AbstractContextManager[None]:
        """Name the contents of the transfers that the enclosed code starts, such as ``compressed gradients``."""
        return nullcontext()

    def capturing(self) -> AbstractContextManager[list[tuple[str, float]]]:
        """Collect names and bytes of the collectives of a CUDA graph, for ``sent`` at each replay."""
        return nullcontext([])

    def run(self, operation: str, group: Any, sent: float, call: Callable[[], Any]) -> Any:
        """Call a collective that sends ``sent`` bytes from this rank; returns its handle, or None if it is complete.

        A transfer of this rank alone has a name such as ``host`` or ``disk`` as ``group``.
        """
        return call()

    def sent(self, operation: str, size: float) -> None:
        """Count a message that is not waited for here."""


RANK_METER: RankLocal[NoMeter] = RankLocal(NoMeter)
METER: NoMeter = cast(NoMeter, Forwarding(RANK_METER))
"""The meter of this rank."""
