"""Hashes of global tensors from the boxes that all ranks hold, and of the tensors of a checkpoint.

Ranks add integers; no tensor is gathered. Every element counts once, on the rank that owns it. In addition all copies
are summed: if every element is held k times, the sum of all copies must be k times the sum of the owned elements
modulo 2^64, otherwise copies differ.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_core.checkpoint.boxes import TensorBox
from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.checkpoint.reader import CheckpointReader
from megatron_core.errors import MegatronError
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.parallel.texts import gather_strings
from megatron_core.reports.hash_sums import box_sum, combined, finished


@dataclass(frozen=True)
class Hashes:
    """Hashes of tensors by name, in the order of the model's computation."""

    by_tensor: Mapping[str, str]
    differing: tuple[str, ...] = ()
    """Tensors whose copies on several ranks differ."""

    @property
    def total(self) -> str:
        """One hash of all tensors."""
        return combined(self.by_tensor.items())


@dataclass(frozen=True)
class _Tensor:
    """A global tensor: its place in the order, shape and dtype, and on how many ranks its elements are."""

    order: int | None
    shape: tuple[int, ...]
    dtype: str
    owned: int
    copies: int

    def line(self, name: str) -> str:
        """The tensor as a line of text."""
        shape = ",".join(map(str, self.shape))
        return f"{'' if self.order is None else self.order}\t{name}\t{self.dtype}\t{shape}\t{self.owned}\t{self.copies}"


@dataclass
class _Sums:
    """Sums of this rank's boxes of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    owned: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)
    numel_owned: int = 0
    numel: int = 0

    def add(self, piece: TensorBox) -> None:
        """Add a box."""
        (self.owned if piece.owned else self.copies).append(box_sum(piece.memory, piece.box, piece.global_shape))
        self.numel += piece.box.numel
        self.numel_owned += piece.box.numel * piece.owned


class GlobalHashes:
    """Hashes one set of tensors, such as the gradients, repeatedly; all ranks of ``group`` call it together.

    ``order``: for names on this rank their place in the model's computation; ranks with a copy may lack the name. The
    first call exchanges names and shapes, so that later ones consist of one sum over the ranks.
    """

    def __init__(self, group: Group, device: torch.device, order: Mapping[str, int]) -> None:
        self._group = group
        self._device = device
        self._order = order
        self._tensors: dict[str, _Tensor] = {}
        self._own: list[str] = []

    @torch.no_grad()
    def __call__(self, pieces: Iterable[TensorBox]) -> Hashes:
        """Return the hashes of all ranks' tensors from this rank's ``pieces``, copies included.

        Each element must be ``owned`` in the pieces of exactly one rank. The result is equal on all ranks.
        """
        sums: dict[str, _Sums] = {}
        for piece in pieces:
            local = sums.setdefault(piece.name, _Sums(piece.global_shape, piece.memory.dtype))
            local.add(piece)
        if not self._tensors:
            self._exchange(sums)
        if sorted(sums) != self._own:
            raise MegatronError("the tensors to hash differ from those of the first call; use another GlobalHashes")
        numbers = {name: number for number, name in enumerate(self._tensors)}
        table = torch.zeros(2, len(numbers), dtype=torch.int64, device=self._device)
        for name, local in sums.items():
            owned = _added(local.owned, self._device)
            table[0, numbers[name]] = owned
            table[1, numbers[name]] = owned + _added(local.copies, self._device)
        all_reduce_(table, self._group)
        return self._read(*table.tolist())

    def _read(self, owned: list[int], counted: list[int]) -> Hashes:
        hashes = {}
        differing = []
        for (name, tensor), total, every in zip(self._tensors.items(), owned, counted, strict=True):
            hashes[name] = finished(total, tensor.shape, getattr(torch, tensor.dtype))
            copies, remainder = divmod(tensor.copies, max(tensor.owned, 1))
            if not remainder and (every - copies * total) % 2**64:
                differing.append(name)
        return Hashes(hashes, tuple(differing))

    def _exchange(self, sums: Mapping[str, _Sums]) -> None:
        """Find the tensors of all ranks and the numbers of their owned elements and copies."""
        self._own = sorted(sums)
        lines = [
            _Tensor(self._order.get(n), s.shape, str(s.dtype).removeprefix("torch."), s.numel_owned, s.numel).line(n)
            for n, s in sums.items()
        ]
        tensors: dict[str, _Tensor] = {}
        for text in gather_strings("\n".join(lines), self._group, self._device):
            for name, tensor in _parsed(text):
                known = tensors.get(name)
                owned, copies = (known.owned, known.copies) if known else (0, 0)
                order = known.order if known and tensor.order is None else tensor.order
                tensors[name] = _Tensor(order, tensor.shape, tensor.dtype, owned + tensor.owned, copies + tensor.copies)
        self._tensors = dict(sorted(tensors.items(), key=lambda item: (item[1].order or 0, item[0])))


def _added(sums: list[Tensor], device: torch.device) -> Tensor:
    if not sums:
        return torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([value.to(device) for value in sums]).sum()


def _parsed(text: str) -> Iterator[tuple[str, _Tensor]]:
    for line in text.splitlines():
        order, name, dtype, shape, owned, copies = line.split("\t")
        sizes = tuple(int(size) for size in shape.split(",") if size)
        yield name, _Tensor(int(order) if order else None, sizes, dtype, int(owned), int(copies))


def checkpoint_hashes(reader: CheckpointReader) -> dict[str, str]:
    """The hash of every tensor of a checkpoint by name; it does not depend on the layout in which it was saved.

    Memory of the largest stored box is needed. Errors: ``CheckpointError``.
    """
    hashes = {}
    for name, tensor in sorted(reader.manifest.tensors.items()):
        total = sum(int(box_sum(values, box, tensor.shape)) for box, values in reader.boxes(name))
        hashes[name] = finished(total, tensor.shape, TORCH_DTYPES[tensor.dtype])
    return hashes
