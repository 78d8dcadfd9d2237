"""Shared memory of the ranks of one host: discovery of reachable ranks, and one arena per rank.

An arena is an anonymous memory file (memfd) that other ranks open through /proc. It has no name that could be left
behind: it is freed with the last process that maps it, and the size of /dev/shm does not limit it. An arena has the
size of the machine's memory, but only written pages use memory.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(__file__).parents[2] / "ops" / "lib"
"""Folder of the built native libraries."""
INTERFACE = 1
"""Version of csrc/cpu/transport/transport.h that this file calls."""
SPIN = 50
"""Microseconds of busy waiting before a wait sleeps, if each rank has a core: twice the time of a wakeup."""
_NUMBER = ctypes.c_int64
_POINTER = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "interface": (_NUMBER, ()),
    "endpoint": (_POINTER, (_POINTER, _NUMBER, _NUMBER)),
    "rings": (_NUMBER, (_POINTER, _NUMBER)),
    "group": (_POINTER, (_POINTER, _NUMBER, _NUMBER, _POINTER, _POINTER)),
    "post": (_NUMBER, (_POINTER, *[_NUMBER] * 4, _POINTER, _NUMBER, _POINTER, _NUMBER)),
    "complete": (_NUMBER, (_POINTER, *[_NUMBER] * 5, _POINTER, _NUMBER, _POINTER, _NUMBER)),
    "send": (_NUMBER, (_POINTER, _NUMBER, _NUMBER, _POINTER, _NUMBER)),
    "receive": (_NUMBER, (_POINTER, *[_NUMBER] * 3, _POINTER, _NUMBER, _NUMBER)),
    "posted": (None, (_POINTER, _NUMBER, _NUMBER, _NUMBER, _POINTER)),
}


def shared_memory_path() -> Path:
    """Path of the library for this processor."""
    avx2, default = (FOLDER / f"libmegatron_transport_{level}.so" for level in ("avx2", "default"))
    return avx2 if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and avx2.exists() else default


@cache
def shared_memory_library() -> Any:
    """The loaded library, or the reason why it cannot be loaded."""
    path = shared_memory_path()
    if not path.exists():
        return f"{path.name} was not built; install a C++ compiler (GCC or Clang), then run pip install . (or -e .)"
    try:
        loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = loaded[f"megatron_transport_{name}"]
            function.restype = result
            function.argtypes = arguments
            setattr(loaded, name, function)
    except (OSError, AttributeError) as error:
        return f"{path.name} cannot be loaded: {error}; run pip install . (or -e .) again"
    if loaded.interface() != INTERFACE:
        return (
            f"{path.name} has interface version {loaded.interface()}, but {INTERFACE} is needed; "
            "run pip install . again"
        )
    return loaded


def host_identity() -> str:
    """Identifies ranks that can open each other's memory: same running kernel, process namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _start_time(pid: int) -> str | None:
    """Start time of a process in the kernel's units; None if it has ended, even as a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True)
class Peer:
    """A rank of this host, possibly this one: its process, and the address of its arena in this process."""

    pid: int
    start_time: str
    address: int
    mapping: mmap.mmap

    @property
    def is_alive(self) -> bool:
        """Whether its process is running."""
        return _start_time(self.pid) == self.start_time


class Host:
    """The shared memory of this rank and the ranks of its host; all ranks of the job construct it together.

    ``reasons[rank]``: why a rank cannot share memory (empty if it can). ``hosts[rank]``: its host.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        library = shared_memory_library()
        obstacle = library if isinstance(library, str) else ""
        bytes_ = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        numbers = count()

        def gather(text: str) -> list[str]:
            return _exchange(store, f"arena {next(numbers)}", text, rank, size)

        self.hosts, self.reasons, self.peers = map_arenas(bytes_, rank, gather, obstacle)
        if not self.reasons[rank]:
            own_peer = self.peers[rank]
            crowded = len(self.peers) > len(os.sched_getaffinity(0))
            self.endpoint = library.endpoint(own_peer.address, len(own_peer.mapping), 0 if crowded else SPIN)

    def obstacle(self, ranks: Sequence[int]) -> str | None:
        """Reason why these ranks cannot use shared memory; None if they can. The same on all of them."""
        if len({self.hosts[rank] for rank in ranks if self.hosts[rank]}) > 1:
            return "its ranks are on several hosts"
        return next((f"rank {rank}: {self.reasons[rank]}" for rank in ranks if self.reasons[rank]), None)


def map_arenas(
    bytes_: int, rank: int, gather: Callable[[str], list[str]], obstacle: str = ""
) -> tuple[list[str], list[str], dict[int, Peer]]:
    """Create an arena of ``bytes_`` on each rank, and map those of this host's ranks; a collective call.

    ``gather`` returns the texts of all ranks. ``obstacle``: why this rank takes no part. Returns the host of each rank,
    the reason why it cannot share memory (empty if it can), and the arenas by rank; they begin at ``Peer.address`` and
    have another page at the end.
    """
    descriptor = -1
    reason = obstacle
    if not reason:
        try:
            card, descriptor = _open_arena(bytes_)
        except _Unavailable as error:
            reason = str(error)
    cards = gather(card if descriptor >= 0 else f"\n{reason}")
    hosts = [text.split("\n")[0] for text in cards]
    peers: dict[int, Peer] = {}
    if descriptor >= 0:
        try:
            for other, host in enumerate(hosts):
                if host == hosts[rank]:
                    peers[other] = _map(cards[other].split("\n")[1:], other)
        except _Unavailable as error:
            reason = str(error)
    # After this exchange every rank has finished mapping.
    reasons = gather(reason)
    if descriptor >= 0:
        os.close(descriptor)
    return hosts, reasons, peers


def _open_arena(bytes_: int) -> tuple[str, int]:
    """Create this rank's arena; returns the text that other ranks need to open it, and its file descriptor."""
    token = secrets.token_hex(16)
    descriptor = -1
    try:
        descriptor = os.memfd_create("megatron")
        os.ftruncate(descriptor, bytes_ + mmap.PAGESIZE)
        os.pwrite(descriptor, token.encode(), bytes_)
        card = [host_identity(), str(os.getpid()), _start_time(os.getpid()) or "", str(descriptor), token]
    except (OSError, ValueError, OverflowError, AttributeError) as error:
        if descriptor >= 0:
            os.close(descriptor)
        raise _Unavailable(f"no shared memory of {bytes_ >> 20} MiB: {error}") from None
    return "\n".join(card), descriptor


class _Unavailable(Exception):
    """The reason why this rank has no shared memory."""


def _map(card: list[str], rank: int) -> Peer:
    """Map the arena of a rank, described by ``card``."""
    pid, start_time, descriptor, token = card
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith("/memfd:megatron"):
            raise _Unavailable(f"{path} is not shared memory of rank {rank}")
        opened = os.open(path, os.O_RDWR)
        try:
            mapping = mmap.mmap(opened, os.fstat(opened).st_size)
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:
        raise _Unavailable(f"the memory of rank {rank} ({path}) cannot be mapped: {error}") from None
    if mapping[-mmap.PAGESIZE : len(token) - mmap.PAGESIZE] != token.encode():
        raise _Unavailable(f"{path} is not the memory of rank {rank}")
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return Peer(int(pid), start_time, address, mapping)


def _exchange(store: dist.Store, name: str, text: str, rank: int, size: int) -> list[str]:
    """Gather one text from every rank."""
    store.set(f"{name}/{rank}", text)
    return [store.get(f"{name}/{other}").decode() for other in range(size)]


def exchange_numbers(store: dist.Store, name: str, number: int, rank: int, size: int) -> list[int]:
    """Gather one integer from every rank."""
    return [int(text) for text in _exchange(store, name, str(number), rank, size)]
