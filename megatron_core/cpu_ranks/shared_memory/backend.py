"""Registration of the backend ``shm`` and its fallback to gloo."""

from typing import Any

import torch.distributed as dist

from megatron_core.cpu_ranks.shared_memory.group import SharedMemoryGroup
from megatron_core.cpu_ranks.shared_memory.host import Host, shared_memory_library
from megatron_core.parallel.groups import SHARED_MEMORY

_current: list[Host] = []  # of the latest world


def register() -> None:
    """Register ``shm`` with torch.distributed, for ``init_process_group("shm")``."""
    if SHARED_MEMORY not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHARED_MEMORY, _create, extended_api=True, devices=["cpu"])


def _create(opts: Any, _: Any) -> Any:
    """Create a process group; all ranks choose gloo if some of them cannot share memory."""
    store = opts.store
    rank = opts.group_rank
    size = opts.group_size
    ranks = list(opts.global_ranks_in_group)
    # The group of all ranks: the job's, or the first one of a job that has another backend.
    if not ranks or (not _current and size == dist.get_world_size()):
        _current[:] = [Host(dist.PrefixStore("host", store), rank, size)]
        ranks = list(range(size))
    (host,) = _current
    if host.obstacle(ranks) is None:
        return SharedMemoryGroup(host, store, rank, ranks, opts.timeout)
    return dist.ProcessGroupGloo(store, rank, size, timeout=opts.timeout)


def forget() -> None:
    """Release the memory of the latest world, whose groups no longer exist."""
    _current.clear()


def unavailable_reason() -> str | None:
    """Reason why the ranks of the world cannot all share memory; None if they can."""
    (host,) = _current
    return host.obstacle(range(len(host.hosts)))


def expected(backend: str = "auto") -> str:
    """The backend expected on this host, before the ranks have joined."""
    return "gloo" if backend == "gloo" or isinstance(shared_memory_library(), str) else "shared memory"


def describe() -> str:
    """One line that names the backend of the world's groups."""
    if dist.get_backend() != SHARED_MEMORY:
        return str(dist.get_backend())
    (host,) = _current
    reason = unavailable_reason()
    if reason is None:
        return "shared memory"
    if any(host.reasons):
        return f"gloo for groups of some ranks, because {reason}" if _any_pair(host) else f"gloo, because {reason}"
    return "shared memory within a host, gloo between hosts"


def _any_pair(host: Host) -> bool:
    good = [name for name, reason in zip(host.hosts, host.reasons, strict=True) if not reason]
    return len(set(good)) < len(good)
