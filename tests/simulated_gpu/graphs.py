"""CUDA graphs of the simulated GPU: a capture records operators, and a replay runs them on the same memory.

As on a GPU, a capture computes nothing: memory that existed before keeps its values, and new memory is NaN until the
first replay. Memory that only the graph refers to may be reused between replays: it is NaN after each. So is all memory
of graphs that were captured later into the same pool, because it may be that of temporaries of this graph: a pool may
only be shared by graphs that are replayed in the order of their capture. Waits of the host and copies between host and
device during a capture are errors.
"""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.simulated_gpu.device import FRAME, LOG, _tensors
from tests.simulated_gpu.streams import Plain

_numbers = count()


class CUDAGraph:
    """torch.cuda.CUDAGraph."""

    pool: Any = None
    number = -1
    """Place in the order of captures."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._entries: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self._new: dict[int, Tensor] = {}
        """Memory that the capture allocated, by address."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """Memory of others that it would change, and its values."""
        self._own: dict[int, Tensor] = {}
        """All tensors of the record, by their ids."""
        LOG.graphs.append(self)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Start to record the operators."""
        assert capture_error_mode in ("global", "thread_local", "relaxed")
        assert LOG.capture is None, "a capture inside of a capture"
        assert FRAME.stream is not None, "a capture in the default stream"
        self.pool, self.number = graph_pool_handle() if pool is None else pool, next(_numbers)
        LOG.capture = self

    def capture_end(self) -> None:
        """Undo what the capture has computed."""
        LOG.capture = None
        with Plain(), torch.no_grad():
            self._undo()

    def changes(self, memory: Tensor) -> None:
        """The capture is about to change ``memory``, a tensor of the CPU."""
        address = memory.untyped_storage().data_ptr()
        if address not in self._new and address not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
            self._before[address] = whole, whole.clone()

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator on tensors of the CPU."""
        found = _tensors([*args, *kwargs.values()])
        given = {each.untyped_storage().data_ptr() for each in found}
        outputs = []
        for at, each in enumerate(_tensors([result])):
            address = each.untyped_storage().data_ptr()
            if address not in given:
                self._new[address] = each
                outputs.append((at, each))
            self._own[id(each)] = each
        self._own |= {id(each): each for each in found}
        self._entries.append((func, args, kwargs, outputs))

    def note_collective(self, collective: Any, args: Any, kwargs: Any) -> Any:
        """Record a collective over memory of the CPU; its handle is complete."""
        if collective.__name__ in ("isend", "irecv", "send", "recv"):
            raise RuntimeError(f"a capture of {collective.__name__} is not simulated")
        self.changes(args[0])
        given = kwargs | {"async_op": False}
        self.note(collective, args, given, collective(*args, **given))
        return SimpleNamespace(wait=lambda: True) if kwargs.get("async_op") else None

    def _undo(self) -> None:
        for whole, values in self._before.values():
            whole.copy_(values)
        self._before.clear()
        for memory in self._new.values():
            _forget(memory)

    def replay(self) -> None:
        """Run the recorded operators."""
        assert LOG.capture is None, "a replay inside of a capture"
        LOG.replays += 1
        with Plain(), torch.no_grad():
            for func, args, kwargs, outputs in self._entries:
                results = _tensors([func(*args, **kwargs)])
                for at, memory in outputs:
                    if results[at] is not memory:
                        memory.copy_(results[at])
            counts: dict[int, int] = {}
            for each in {number: own for graph in LOG.graphs for number, own in graph._own.items()}.values():
                address = each.untyped_storage().data_ptr()
                counts[address] = counts.get(address, 0) + 1
            for address, memory in self._new.items():
                storage = memory.untyped_storage()
                if torch._C._storage_Use_Count(storage._cdata) <= counts[address] + 1:  # and ``storage``
                    _forget(memory)
            later = [each for each in LOG.graphs if each.pool == self.pool and each.number > self.number]
            for memory in (memory for each in later for memory in each._new.values()):
                _forget(memory)


def _forget(memory: Tensor) -> None:
    if memory.is_floating_point():
        memory.fill_(torch.nan)


def graph_pool_handle() -> tuple[int, int]:
    """torch.cuda.graph_pool_handle."""
    return (0, next(_numbers))
