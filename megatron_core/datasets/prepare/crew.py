"""The workers and their tasks: what is asked of them, and what they have made."""

from collections.abc import Iterator, Sequence
from mmap import mmap
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron_core.datasets.prepare.dispatch import Dispatcher
from megatron_core.datasets.prepare.documents import Limits
from megatron_core.datasets.prepare.encode import Layout
from megatron_core.datasets.prepare.inputs import Source
from megatron_core.datasets.prepare.parts import Group, part_path, parts_in
from megatron_core.datasets.prepare.pool import Pool
from megatron_core.datasets.prepare.settings import PrepareSettings
from megatron_core.datasets.prepare.shelf import Shelf
from megatron_core.datasets.prepare.worker import Begin, Loaded, Made, Sample, Task, run_workers

# One that is made and one that waits: so a worker need not wait until the parent has joined a part.
TASKS_EACH = 2
# Those of its tasks, and of a part that waits until it is joined.
SLOTS_EACH = TASKS_EACH + 1


class Crew:
    """Asks without waiting, by `begin` and `ask_for`; `answer` says which back end was loaded, and its answer."""

    def __init__(
        self,
        backend: str,
        settings: PrepareSettings,
        sources: Sequence[Source],
        limits: Limits,
        folder: Path,
        part_bytes: int,
    ) -> None:
        self._limits = limits
        self._folder = folder
        # Tokens take about half of the text's bytes.
        self._shelf = Shelf(SLOTS_EACH * settings.processes, part_bytes)
        self._shelved: dict[tuple[int, int], int] = {}
        self._pool = Pool(settings.processes, run_workers, (backend, settings, sources, limits, folder, self._shelf))
        self._given = [0] * len(self._pool)
        self._groups: Sequence[Group] = ()
        self._dispatcher = Dispatcher((), (0, 0), 0)
        self._probes: list[tuple[str, list[int]]] = []

    def ask_for(self, texts: Sequence[str]) -> None:
        """Have one worker tokenize a sample."""
        self._pool.send(0, Sample(list(texts)))

    def begin(self, layout: Layout, groups: Sequence[Group], position: tuple[int, int]) -> None:
        """Have parts made, from a position on, except those that are there."""
        self._groups = groups
        self._dispatcher = Dispatcher(groups, position, self._limits.parts_ahead)
        for group, index, last in parts_in(self._folder):
            self._dispatcher.found(group, index, last)
        for worker in range(len(self._pool)):
            self._pool.send(worker, Begin(layout))
        self._give()

    def answer(self) -> tuple[str, str, np.ndarray, np.ndarray]:
        """The back end's name, why it is not a faster one, and the sample's ids and lengths."""
        loaded: Loaded = self._pool.receive(0)
        while isinstance(answer := self._pool.receive(0), Made):
            self._note(0, answer)
        return (loaded.name, loaded.reason, *answer)

    @property
    def position(self) -> tuple[int, int]:
        """Group and index of the part that `ready` gives next."""
        return self._dispatcher.position

    @property
    def finished(self) -> bool:
        """Whether `ready` has given all parts."""
        return self._dispatcher.finished

    def ready(self) -> Iterator[BinaryIO | mmap]:
        """The parts that are made, in order, up to the first that is not, each to be read before the next is asked for.

        A part is let go of then, so that its memory serves for the next one; what the journal has not counted yet, the
        work of seconds, an interrupted run makes again.
        """
        self._give()
        while self._dispatcher.ready():
            group, index, last = self._dispatcher.pop()
            slot = self._shelved.pop((group, index), None)
            if slot is not None:
                yield self._shelf.at(slot)
                self._shelf.give_back(slot)
                continue
            path = part_path(self._folder, group, index, last)
            with path.open("rb") as file:
                yield file
            path.unlink()
        # Parts behind the end of a stream are nobody's, and their slots free.
        for part in [part for part in self._shelved if part < self.position]:
            self._shelf.give_back(self._shelved.pop(part))
        self._give()

    def receive(self) -> list[tuple[str, list[int]]]:
        """Wait for a part to be made; the texts that parts had for comparison, with their ids."""
        assert any(self._given), f"no worker has anything to do, and part {self.position} is missing"
        for worker, made in self._pool.receive_any(1.0):
            self._note(worker, made)
        probes, self._probes = self._probes, []
        return probes

    def dismiss(self) -> None:
        """Have the workers end, which have nothing left to do; `stop` waits for it."""
        self._pool.dismiss()

    def stop(self) -> None:
        """End the workers."""
        self._pool.stop()
        self._shelf.close()

    def _note(self, worker: int, made: Made) -> None:
        self._given[worker] -= 1
        self._dispatcher.returned()
        self._dispatcher.found(made.group, made.index, made.last)
        if made.shelved:
            self._shelved[made.group, made.index] = made.slot
        elif made.slot is not None:
            self._shelf.give_back(made.slot)
        if made.probe is not None:
            self._probes.append(made.probe)

    def _give(self) -> None:
        for worker in sorted(range(len(self._pool)), key=self._given.__getitem__):
            while self._given[worker] < TASKS_EACH and (part := self._dispatcher.take(worker)) is not None:
                self._pool.send(worker, Task(*part, self._groups[part[0]].pieces(part[1]), self._shelf.take()))
                self._given[worker] += 1
