"""Interruption of this process's waits for other ranks: one thread requests it, and the waiting thread raises."""

import torch.distributed as dist


class InterruptedWait(dist.DistBackendError):
    """A wait for other ranks was ended because the job has failed elsewhere."""


# Of the process and not of a rank: a failure elsewhere ends all waits of this process.
_reason = [""]


def request(reason: str) -> None:
    """Let all present and later waits of this process raise ``InterruptedWait`` with this ``reason``."""
    _reason[0] = reason


def withdraw() -> None:
    """Allow waits again."""
    _reason[0] = ""


def raise_if_requested() -> None:
    """Raise ``InterruptedWait`` if an end was requested."""
    if _reason[0]:
        raise InterruptedWait(_reason[0])
