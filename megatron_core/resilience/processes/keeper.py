"""The keeper: a process next to each supervisor that sends the rank's copies of its state to other ranks.

A rank whose part of the state has changed with the layout reads the parts it lacks from the keepers of the ranks that
have them, also of a rank whose training process is dead. With a mirror, a keeper also reads every copy of another rank,
in the background, so that the loss of a host loses no state.

Each request is a line of JSON; each answer is a line of JSON, followed by bytes.
"""

import ctypes
import hmac
import json
import os
import secrets
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from megatron_core.cpu_ranks import interrupt
from megatron_core.errors import LayoutError, visible
from megatron_core.launcher import read_integer
from megatron_core.resilience.processes.memory import MIRRORED, MIRRORS, Copy, HostMemory
from megatron_core.resilience.processes.rendezvous import Rendezvous

PATIENCE = 30.0
"""Seconds without received data after which a keeper counts as lost."""
TICK = 0.2
"""Seconds after which a reader checks whether its wait was interrupted."""
POLL = 0.002
"""Seconds between checks for a new copy to mirror."""
IDLE = 0.2
"""Seconds between checks whether there is anything to mirror."""
LONGEST = 2**26
"""Bytes of the longest request."""
LOOPBACK = "127.0.0.1"
Address = tuple[str, int, str]
"""Host, port, and the secret that a keeper requires."""


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG of linux/prctl.h


class Connection:
    """A connection to the keeper of another rank."""

    def __init__(self, address: Address) -> None:
        """Errors: ``OSError`` if the keeper cannot be reached."""
        host, port, self._word = address
        self._socket = socket.create_connection((host, port), PATIENCE)
        self._socket.settimeout(TICK)

    def ask(self, what: str, copy: Copy, **details: Any) -> dict[str, Any]:
        """Send a request about ``copy``, and return the answer. ``KeyError`` if the keeper does not have the copy."""
        request = {"word": self._word, "what": what, "copy": list(copy), **details}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.receive(1)
        answer: dict[str, Any] = json.loads(line)
        if not answer["found"]:
            raise KeyError(copy)
        return answer

    def receive(self, size: int, out: memoryview | None = None) -> memoryview:
        """The next ``size`` bytes, in ``out`` if it is given. ``InterruptedWait`` if the wait is interrupted."""
        view = memoryview(bytearray(size)) if out is None else out[:size]
        offset = 0
        last_arrival = time.monotonic()
        while offset < size:
            try:
                count = self._socket.recv_into(view[offset:])
            except TimeoutError:
                interrupt.raise_if_requested()
                if time.monotonic() - last_arrival > PATIENCE:
                    raise
                continue
            if count == 0:
                raise ConnectionResetError("the process that keeps the state of another rank has ended")
            offset = offset + count
            last_arrival = time.monotonic()
        return view

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class RemoteCopy:
    """A copy in the memory of another rank's keeper."""

    def __init__(self, connection: Connection, copy: Copy) -> None:
        """Errors: ``KeyError`` if the keeper does not have ``copy``."""
        self._connection = connection
        self.copy = copy
        answer = connection.ask("open", copy)
        self.size = int(answer["size"])
        """Bytes of its tensors."""
        self.table, self.state = (bytes(connection.receive(answer[key])) for key in ("table", "state"))

    def read(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        """The bytes of ``spans``, offsets and lengths."""
        self._connection.ask("read", self.copy, spans=list(spans))
        return [torch.frombuffer(self._connection.receive(length), dtype=torch.uint8) for _, length in spans]

    def read_all(self, out: memoryview) -> None:
        """Read all bytes into the beginning of ``out``."""
        self._connection.ask("read", self.copy, spans=[(0, self.size)])
        self._connection.receive(self.size, out)


class _Answers(socketserver.StreamRequestHandler):
    """Answers the requests of one reader."""

    server: "_Server"

    def handle(self) -> None:
        # A killed reader resets its connection; this rank has not failed.
        with suppress(ConnectionError):
            while line := self.rfile.readline(LONGEST):
                try:
                    request = json.loads(line)
                except ValueError:
                    return
                word = str(request.get("word")) if isinstance(request, dict) else ""
                if not hmac.compare_digest(word.encode(errors="replace"), self.server.word.encode()):
                    return
                try:
                    for piece in self.server.answer(request["what"], Copy(*request["copy"]), request):
                        self.wfile.write(piece)
                except KeyError:
                    self.wfile.write(b'{"found": false}\n')


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, address: str, memory: HostMemory, mirror: HostMemory) -> None:
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), _Answers)
        self._memory = memory
        self._mirror = mirror
        self.word = secrets.token_hex(16)

    def answer(self, what: str, copy: Copy, request: dict[str, Any]) -> Iterable[bytes | memoryview]:
        """The parts of an answer. ``KeyError`` if ``copy`` is absent."""
        memory = self._memory if copy.owner == self._memory.rank else self._mirror
        if what == "newest":
            copy = self._newest(after=copy.stamp)
            return [_line(copy=list(copy))]
        table, state, data = memory.read(copy)
        if what == "open":
            return [_line(size=len(data), table=len(table), state=len(state)), table, state]
        if what == "mirrored":
            memory.numbers[MIRRORED] = copy.stamp
        if what != "read":
            return [_line()]
        view = data.numpy().data
        return [_line(), *(view[offset : offset + length] for offset, length in request["spans"])]

    def _newest(self, after: int) -> Copy:
        """Wait for a copy of this rank whose stamp is greater than ``after``; at most ``PATIENCE`` / 2."""
        deadline = time.monotonic() + PATIENCE / 2
        while time.monotonic() < deadline:
            copies = self._memory.copies()
            if copies and copies[-1].stamp > after:
                return copies[-1]
            time.sleep(POLL)
        raise KeyError(after)


def _line(**answer: Any) -> bytes:
    return json.dumps({"found": True, **answer}).encode() + b"\n"


def start_keeper(rendezvous: Rendezvous, memory: HostMemory, mirror: HostMemory, address: str = LOOPBACK) -> int:
    """Fork the keeper of this rank at ``address``; returns its process id. It ends with this process."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        if os.getppid() == parent:
            server = _Server(address, memory, mirror)
            with suppress(RuntimeError, OSError):  # the job's store has ended
                _keep(rendezvous.clone(), server, memory, mirror)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(visible(f"error: the keeper of rank {memory.rank} has ended: {reason}"), file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def _keep(rendezvous: Rendezvous, server: _Server, memory: HostMemory, mirror: HostMemory) -> None:
    host, port = server.socket.getsockname()[:2]
    rendezvous.offer((host, port, server.word))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        owner = memory.numbers[MIRRORS] - 1
        address = None if owner < 0 else rendezvous.keeper(owner)
        if address is None:
            time.sleep(IDLE)
            continue
        with suppress(OSError, KeyError):  # the other keeper is lost, or its rank is idle
            _mirror(Connection(address), owner, memory, mirror)
        time.sleep(POLL)


def _mirror(connection: Connection, owner: int, memory: HostMemory, mirror: HostMemory) -> None:
    """Read the next copies of ``owner`` as long as its copies are wanted."""
    newest_copy = [Copy(owner, -1, 0), *(copy for copy in mirror.copies() if copy.owner == owner)][-1]
    while memory.numbers[MIRRORS] - 1 == owner:
        newest = Copy(*connection.ask("newest", newest_copy)["copy"])
        remote = RemoteCopy(connection, newest)
        remote.read_all(mirror.begin().numpy().data)
        connection.ask("check", newest)  # its memory was not written again meanwhile
        mirror.commit_copy(newest, remote.table, remote.state, remote.size)
        connection.ask("mirrored", newest)
        newest_copy = newest
    connection.close()


def own_address(size: int) -> str:
    """The address of this host at which the keepers of a job of ``size`` ranks can reach it.

    It is the address of the interface to ``MASTER_ADDR``, or the loopback address if all ranks are on this host.
    Errors:
    ``LayoutError`` if the address cannot be found, or is the loopback address although there are other hosts.
    """
    if read_integer("LOCAL_WORLD_SIZE", 1, least=1) == size:
        return LOOPBACK
    master = os.environ.get("MASTER_ADDR", LOOPBACK)
    try:
        family, socket_type, _, _, where = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket_type) as probe:
            probe.connect(where)
            address = str(probe.getsockname()[0])
    except OSError as error:
        raise LayoutError(
            f"MASTER_ADDR={master!r}: this host has no way to it ({error}), so other ranks could not read the "
            "copies of its state; set MASTER_ADDR to an address of rank 0's host that all hosts can reach"
        ) from None
    if "LOCAL_WORLD_SIZE" in os.environ and (address.startswith("127.") or address == "::1"):
        raise LayoutError(
            f"MASTER_ADDR={master!r} is {address} on this host, which other hosts cannot reach, but "
            f"{os.environ['LOCAL_WORLD_SIZE']} of {size} ranks are here; set MASTER_ADDR to an address of rank 0's "
            "host that all hosts can reach, such as its IP address"
        )
    return address
