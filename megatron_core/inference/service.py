"""An engine in a separate thread, with requests from the threads of a server; the other ranks follow rank 0."""

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.errors import MegatronError
from megatron_core.inference.engine import Engine
from megatron_core.inference.requests import Progress, Request
from megatron_core.inference.sampling import Sampling
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.groups import Group, process_group
from megatron_core.parallel.texts import encoded_text

HEARTBEAT = 1.0
"""Seconds between synchronizations of idle ranks, so that no collective waits long."""


Listener = Callable[[Progress | None], object]


class QueueFullError(MegatronError):
    """Too many requests are waiting."""


@dataclass(frozen=True)
class _Command:
    """An action of all ranks between two steps: cancel a ticket, submit a request, or stop (without a ticket)."""

    ticket: int | None
    request: Request | None = None


class StringBroadcast:
    """Texts from the first rank of ``group`` to the others; it is at most ``ahead`` texts ahead of them."""

    def __init__(self, group: Group, device: torch.device, *, ahead: int) -> None:
        self._group = group
        self._device = device
        self._ahead = ahead
        self._sent: deque[list[tuple[torch.Tensor, dist.Work | None]]] = deque()

    @property
    def is_source(self) -> bool:
        """Whether this rank is the one that sends."""
        return self._group.rank() == 0

    def exchange(self, text: str) -> str:
        """Return the first rank's ``text`` on every rank; that of the others is ignored. Every rank calls this."""
        if self._group.size() == 1:
            return text
        # Messages instead of a broadcast, so that the source need not wait: it is ahead of ranks that still compute.
        group = process_group(self._group)
        if not self.is_source:
            size = torch.zeros(1, dtype=torch.int64, device=self._device)
            dist.recv(size, group=group, group_src=0)
            data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            if data.numel():
                dist.recv(data, group=group, group_src=0)
            return data.cpu().numpy().tobytes().decode()
        data = encoded_text(text, self._device)
        size = torch.tensor([data.numel()], dtype=torch.int64, device=self._device)
        messages = [size, data] if data.numel() else [size]
        targets = range(1, self._group.size())
        # The tensors are kept until they have arrived.
        pairs = [(to, tensor) for to in targets for tensor in messages]
        self._sent.append([(tensor, dist.isend(tensor, group=group, group_dst=to)) for to, tensor in pairs])
        while len(self._sent) > self._ahead:
            for _, handle in self._sent.popleft():
                assert handle is not None, "this rank is in the group"
                handle.wait()
        return text


class RankService:
    """A loop that all ranks run, and that other threads of rank 0 give work and stop.

    Subclasses implement ``run``, and ``_fail_waiting`` for those who still wait when it has ended.
    """

    def __init__(self, thread_name: str, group: Group, device: torch.device, *, ahead: int) -> None:
        self._thread_name = thread_name
        self._texts = StringBroadcast(group, device, ahead=ahead)
        self._changed = threading.Condition()
        self._stopped = False
        self.failure: BaseException | None = None
        """The exception that ended ``run``."""

    def stop(self) -> None:
        """End ``run`` on all ranks after the present work."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def start(self, when_ended: Callable[[], None]) -> threading.Thread:
        """Call ``run`` in a thread, then ``when_ended``; an exception is stored in ``failure``."""
        thread = threading.Thread(target=self._run_and_tell, args=(when_ended,), name=self._thread_name, daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Work until ``stop``; every rank calls this."""
        raise NotImplementedError

    def _fail_waiting(self) -> None:
        """Tell the threads that wait for results that there will be none."""
        raise NotImplementedError

    def _run_and_tell(self, when_ended: Callable[[], None]) -> None:
        try:
            self.run()
        except BaseException as error:  # the starting thread raises it again
            self.failure = error
        finally:
            with self._changed:
                self._stopped = True
            self._fail_waiting()
            when_ended()


class GenerationService(RankService):
    """Submits and cancels requests of other threads between the engine's steps.

    On rank 0, ``submit`` and ``cancel`` may be called from any thread; a listener is called with every ``Progress`` in
    the thread of the service, or with None if the engine fails. The other ranks only call ``run``, and repeat the
    actions of rank 0. At most ``max_waiting`` requests wait.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 64) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        # Rank 0 does not wait for the other ranks, so that the pipeline's stages work at the same time.
        group = engine.generator.groups.group(WORLD)
        device = engine.generator.device
        super().__init__("generation", group, device, ahead=2 * engine.generator.groups.size("pp"))
        self._commands: list[_Command] = []
        self._listeners: dict[int, Listener] = {}
        self._numbers: dict[int, int] = {}
        """Ticket -> the engine's number."""
        self._next_ticket = 0

    def submit(self, requests: Sequence[Request], listeners: Sequence[Listener]) -> list[int]:
        """Queue all of ``requests`` or none; return tickets for ``cancel``.

        ``ConfigError`` for an illegal request, ``QueueFullError`` if there is no room in the queue.
        """
        checked = [self.engine.checked(request) for request in requests]
        with self._changed:
            waiting = self.engine.waiting + sum(command.request is not None for command in self._commands)
            if self._stopped or waiting + len(checked) > self.max_waiting:
                reason = "the server is stopping" if self._stopped else f"{waiting} requests are waiting"
                raise QueueFullError(f"{reason}; at most {self.max_waiting} can wait; try again later")
            tickets = list(range(self._next_ticket, self._next_ticket + len(checked)))
            self._next_ticket += len(checked)
            self._commands += [_Command(ticket, request) for ticket, request in zip(tickets, checked, strict=True)]
            self._listeners |= dict(zip(tickets, listeners, strict=True))
            self._changed.notify()
        return tickets

    def cancel(self, tickets: Sequence[int]) -> None:
        """Cancel requests; finished requests are ignored."""
        with self._changed:
            for ticket in tickets:
                if self._listeners.pop(ticket, None) is not None:
                    self._commands.append(_Command(ticket))
            self._changed.notify()

    def stop(self) -> None:
        """End ``run`` on all ranks after its step."""
        with self._changed:
            self._commands.append(_Command(None))
            super().stop()

    def run(self) -> None:
        """Generate until ``stop``; every rank calls this."""
        while True:
            for command in self._next_commands():
                if command.ticket is None:
                    return
                if command.request is not None:
                    self._numbers[command.ticket] = self.engine.submit(command.request)
                elif command.ticket in self._numbers:
                    self.engine.cancel(self._numbers.pop(command.ticket))
            tickets = {number: ticket for ticket, number in self._numbers.items()}
            for progress in self.engine.step():
                ticket = tickets[progress.number]
                with self._changed:
                    done = progress.finished is not None
                    listener = self._listeners.pop(ticket, None) if done else self._listeners.get(ticket)
                if done:
                    del self._numbers[ticket]
                if listener is not None:
                    listener(progress)

    def _fail_waiting(self) -> None:
        with self._changed:
            listeners = list(self._listeners.values())
            self._listeners.clear()
        for listener in listeners:
            listener(None)

    def _next_commands(self) -> list[_Command]:
        """Return rank 0's commands on all ranks; an idle rank 0 waits for commands."""
        mine: list[_Command] = []
        if self._texts.is_source:
            with self._changed:
                if not self._commands and not self.engine.busy:
                    self._changed.wait(HEARTBEAT)
                mine = self._commands
                self._commands = []
        commands = json.dumps([asdict(command) for command in mine], default=sorted) if mine else ""
        text = self._texts.exchange(commands)
        return [_from_json(entry) for entry in json.loads(text)] if text else []


def _from_json(command: dict[str, Any]) -> _Command:
    request = command["request"]
    if request is not None:
        sampling = Sampling(**request.pop("sampling"))
        ends = frozenset(request.pop("ends"))
        prompt = tuple(request.pop("prompt"))
        request = Request(**request, sampling=sampling, ends=ends, prompt=prompt)
    return _Command(command["ticket"], request)
