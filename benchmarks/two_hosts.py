"""Two hosts on this machine, joined by a link of a given bandwidth and latency; needs root and Linux.

Each host has its own network and its own processes (namespaces), so that its ranks find only each other in shared
memory. The kernel limits the rate of each host's network device (``tc``, tbf), and a process carries the packets from
one device to the other with the latency, as netem does, which kernels of virtual machines often lack.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

ADDRESSES = ("10.213.7.1", "10.213.7.2")
PACKET_BYTES = 1500
BURST_BYTES = 10 * PACKET_BYTES
"""Bytes that a host sends at once after a pause."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


@contextmanager
def two_hosts(bandwidth: float, latency: float) -> Iterator[tuple[str, str]]:
    """Names of two network namespaces with a link of ``bandwidth`` bytes per second in each direction, and ``latency``
    seconds from one to the other. Their addresses are ``ADDRESSES``; the device is named like the namespace."""
    names = (f"mh{os.getpid()}a", f"mh{os.getpid()}b")
    with ExitStack() as stack:
        devices = []
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            devices.append(_device(name))
            stack.callback(os.close, devices[-1])
            _ip("link", "set", name, "mtu", str(PACKET_BYTES), "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for device in ("lo", name):
                _ip("-n", name, "link", "set", device, "up")
            # The qdisc counts bits; packets wait in it, where the sender's TCP sees them, and are never dropped.
            limit = ("rate", f"{round(8 * bandwidth)}bit", "burst", str(BURST_BYTES), "limit", str(2**26))
            _run("tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *limit)
            _run("ip", "netns", "exec", name, "sysctl", "--quiet", "--write", "net.ipv4.tcp_slow_start_after_idle=0")
        link = multiprocessing.get_context("fork").Process(target=carry, args=(*devices, latency))
        link.start()
        stack.callback(link.join)
        stack.callback(link.terminate)
        yield names


def on_host(name: str, words: Sequence[str]) -> list[str]:
    """The command that runs ``words`` on a host; its processes end with it."""
    separate = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    return ["ip", "netns", "exec", name, *separate, *words]


def carry(first: int, second: int, latency: float) -> None:
    """Carry packets between two network devices until the process ends."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # packets do not wait for ranks that compute
    directions = (_Direction(first, second), _Direction(second, first))
    while True:
        waiting = [direction.packets[0][0] for direction in directions if direction.packets]
        timeout = None if not waiting else max(min(waiting) - time.monotonic(), 0.0)
        readable = select.select([direction.source for direction in directions], [], [], timeout)[0]
        for direction in directions:
            if direction.source in readable:
                direction.packets.append((time.monotonic() + latency, os.read(direction.source, 65536)))
            direction.deliver()


class _Direction:
    """One direction of the link."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self._target = source, target
        self.packets: deque[tuple[float, bytes]] = deque()
        """Packets on their way, with the time of their arrival."""

    def deliver(self) -> None:
        """Hand over the packets that have arrived."""
        while self.packets and self.packets[0][0] <= time.monotonic():
            with suppress(OSError):  # the device is not up yet, or no longer
                os.write(self._target, self.packets.popleft()[1])


def _device(name: str) -> int:
    """Descriptor of a new network device whose packets this process reads and writes."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)
