"""Weights of the sampler in memory that all ranks of the host can write, so that a copy to another rank is one copy."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.checkpoint import Box, TensorBox
from megatron_core.cpu_ranks.shared_memory.host import map_arenas
from megatron_core.parallel.groups import SHARED_MEMORY
from megatron_core.parallel.texts import gather_from_all_ranks

ALIGNMENT = 64
"""Bytes of a cache line."""


class SharedWeights:
    """Moves parameters to memory that is shared with the ranks of this host; a collective call.

    ``is_shared``: whether the ranks are joined by shared memory and all could create it; equal on all ranks.
    ``first_rank``: the first of the ranks of this host.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        self._device = device
        self._memories: dict[int, Tensor] = {}
        if device.type == "cpu" and dist.is_initialized() and dist.get_backend() == SHARED_MEMORY:
            self._share(parameters)
        self.is_shared = bool(self._memories)
        self.first_rank = min(self._memories, default=0)

    def _share(self, parameters: Sequence[nn.Parameter]) -> None:
        this_rank = dist.get_rank()
        sizes = [-(-parameter.nbytes // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        gather = partial(gather_from_all_ranks, device=self._device)
        _, reasons, arenas = map_arenas(sum(sizes), this_rank, gather)
        if any(reasons):
            return
        for rank, arena in arenas.items():
            # The tensor keeps the mapping alive.
            self._memories[rank] = torch.frombuffer(arena.mapping, dtype=torch.uint8)
        memories = self._memories[this_rank][: sum(sizes)].split(sizes)
        for parameter, memory in zip(parameters, memories, strict=True):
            parameter.data = memory[: parameter.nbytes].view(parameter.dtype).view(parameter.shape)

    def pieces_of_others(self, pieces: Iterable[TensorBox]) -> dict[int, dict[str, list[TensorBox]]]:
        """The pieces of this host's other ranks, by rank and name, with their memory; a collective call.

        ``pieces``: those of this rank, views of its parameters.
        """
        this_rank = dist.get_rank()
        start = self._memories[this_rank].data_ptr()
        rows = []
        for piece in pieces:
            memory = piece.memory
            view = ((memory.data_ptr() - start) // memory.itemsize, memory.stride(), str(memory.dtype))
            rows.append((piece.name, piece.global_shape, piece.box.start, piece.box.stop, *view))
        texts = gather_from_all_ranks(json.dumps(rows), self._device)
        other_ranks = sorted(self._memories.keys() - {this_rank})
        return {rank: _pieces_in(self._memories[rank], json.loads(texts[rank])) for rank in other_ranks}


def _pieces_in(memory: Tensor, rows: list[Any]) -> dict[str, list[TensorBox]]:
    pieces = defaultdict[str, list[TensorBox]](list)
    for name, shape, start, stop, offset, stride, dtype in rows:
        box = Box(tuple(start), tuple(stop))
        values = memory.view(getattr(torch, dtype.removeprefix("torch."))).as_strided(box.shape, stride, offset)
        pieces[name].append(TensorBox(name, tuple(shape), box, values, owned=False))
    return pieces
