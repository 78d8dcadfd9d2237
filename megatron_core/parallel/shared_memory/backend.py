"""Registration of the backend ``shm``, and when its groups talk through gloo instead."""

from typing import Any

import torch.distributed as dist

from megatron_core.parallel.shared_memory.group import SharedMemoryGroup
from megatron_core.parallel.shared_memory.host import Host, library

BACKEND = "shm"
_current: list[Host] = []  # of the world that was made last


def register() -> None:
    """Make ``shm`` known to torch.distributed: ``init_process_group("shm")``."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(opts: Any, _: Any) -> Any:
    """A group for torch.distributed: gloo's where some ranks cannot share memory, which all of them know alike."""
    store, rank, size = opts.store, opts.group_rank, opts.group_size
    ranks = list(opts.global_ranks_in_group)
    if not ranks:  # the world
        _current[:] = [Host(dist.PrefixStore("host", store), rank, size)]
        ranks = list(range(size))
    (host,) = _current
    if host.obstacle(ranks) is None:
        return SharedMemoryGroup(host, store, rank, ranks, opts.timeout)
    return dist.ProcessGroupGloo(store, rank, size, timeout=opts.timeout)


def unavailable_reason() -> str | None:
    """Why not all ranks of the world can share memory; None if they can."""
    (host,) = _current
    return host.obstacle(range(len(host.hosts)))


def expected(backend: str = "auto") -> str:
    """What ranks of this host will talk through, as far as it is known before they have met."""
    return "gloo" if backend == "gloo" or isinstance(library(), str) else "shared memory"


def describe() -> str:
    """What carries collectives and messages of the world's groups, in one line."""
    if dist.get_backend() != BACKEND:
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
