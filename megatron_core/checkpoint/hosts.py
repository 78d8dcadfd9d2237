"""Whether ranks share the page cache of a folder, and errors that all ranks raise together."""

import socket
from pathlib import Path

import torch

from megatron_core.errors import CheckpointError
from megatron_core.locations import in_storage
from megatron_core.parallel.texts import gather_from_all_ranks

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs between running kernels; only on Linux."""


def page_cache_of(folder: Path) -> str:
    """A name that is equal on ranks whose reads of files in ``folder`` share a page cache; empty in object storage, and
    if the folder cannot be read."""
    if in_storage(folder) is not None:
        return ""
    try:
        status = folder.stat()
    except OSError:
        return ""
    # Not the host's name: containers of one kernel have different names but one page cache, and hosts may have equal
    # names. Device and inode tell whether the path is the same folder in both.
    kernel = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
    return f"{kernel} {status.st_dev} {status.st_ino}"


def raise_on_all_ranks(problem: str, device: torch.device) -> None:
    """Wait for all ranks. Errors: ``CheckpointError`` on all of them if one has a ``problem``, with the first one."""
    fault = next(filter(None, gather_from_all_ranks(problem, device)), "")
    if fault:
        raise CheckpointError(fault)
