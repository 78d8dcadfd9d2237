"""Exit status and message of an error with a known cause."""

import re

import torch
import torch.distributed as dist

from megatron_core.errors import MegatronError, RestartNeeded
from megatron_core.locations import path_of

FAILED = 1
"""Exit status: a restart would fail again (wrong settings or data, the same failure twice at one step)."""
# Distinct from 1, so that a launcher or scheduler can decide whether starting again makes sense.
RESTART = 75
"""Exit status: another rank is lost or hangs; a restart from the last checkpoint may help (EX_TEMPFAIL)."""


class LostRankError(dist.DistBackendError):
    """Another rank has ended or did not respond in time."""


def exit_explanation(error: Exception) -> tuple[int, str] | None:
    """Exit status and message of an error with a known cause; None for an error that needs its traceback."""
    text = str(error)
    if isinstance(error, MegatronError):
        return RESTART if isinstance(error, RestartNeeded) else FAILED, text
    if allocation_that_failed(error) is not None:
        size = _SIZE.search(text)
        what = f"allocating {size[1]} {size[2]}" if size else "allocating a tensor"
        return FAILED, (
            f"out of memory while {what}. Ways out: a smaller --micro-batch-size, --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1, --zero-stage 1 to 3, or more tensor- or "
            "pipeline-parallel ranks; --dry-run prints what a rank needs"
        )
    if isinstance(error, LostRankError):
        return RESTART, text
    # Errors of connections are also ``OSError``s, but they mean a lost peer, which is handled below.
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ConnectionError | TimeoutError):
        where = str(error.filename or "a file or the standard output")
        way_out = "" if path_of(where) is None else "; choose another path, or free space there"
        return FAILED, f"{where[:200]} cannot be used: {error.strerror}{way_out}"
    if not isinstance(error, RuntimeError) or not _is_lost_peer(error):
        return None
    # NCCL appends a C++ backtrace to its first line.
    first = text.splitlines()[0][:300] if text else type(error).__name__
    if re.search("[Tt]imed ?out", text):
        return RESTART, (
            f"a collective was not complete within --distributed-timeout-minutes ({first}): a rank hangs or is slow; "
            "if it is only slow, raise --distributed-timeout-minutes"
        )
    return RESTART, f"another rank has left this job ({first}); the reason is in its message, or it was killed"


# torch has its own class only for GPUs; on a CPU it raises RuntimeError, so the texts of allocators are compared.
_OUT_OF_MEMORY = re.compile(
    "[Uu]nable to allocate|not enough memory|[Oo]ut of memory|[Cc]annot allocate memory|std::bad_alloc"
    "|Storage size calculation overflowed|Overflow when unpacking long"
)
_SIZE = re.compile(r"allocate ([\d.]+) (bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def allocation_that_failed(error: Exception) -> int | None:
    """Bytes of a failed allocation, 0 if the message does not state them; None for any other error."""
    if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
        return None
    size = _SIZE.search(str(error))
    return round(float(size[1]) * _UNITS[size[2]]) if size else 0


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process has ended."""
    # gloo raises plain RuntimeErrors, which only their text distinguishes from faults of a program.
    signs = ("closed by peer", "reset by peer", "Broken pipe", "gloo/transport")
    return isinstance(error, dist.DistBackendError) or any(sign in str(error) for sign in signs)
