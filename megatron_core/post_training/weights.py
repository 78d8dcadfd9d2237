"""Copies of the trained weights in another layout, in memory: each element goes from one owner to its new places."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.checkpoint import Box, TensorBox, parameter_pieces
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.training.state import held_weights, weight_pieces

WINDOW_BYTES = 64 * 2**20
"""Bytes that a rank sends to another one at a time, so that no copy of the whole model is made."""


LARGE = 2**16
"""Elements of a box that is a message of its own: copies of smaller ones cost less than a message."""


@dataclass(frozen=True)
class _Move:
    """A box of a tensor that a rank sends, equal on the sender and the receiver."""

    name: str
    box: Box


class WeightTransfer:
    """Fills the memory of ``targets`` with the trained weights whenever ``run`` is called; built once for a layout.

    The plan is computed from the boxes that each rank owns and needs. A box that this rank holds is copied in place;
    of the others, each rank sends the parts that it would save in a checkpoint.
    """

    def __init__(self, data: DataParallel, targets: Iterable[TensorBox], device: torch.device) -> None:
        _check_present(data)
        self._data = data
        self._device = device
        self._targets = list(targets)
        held = {(piece.name, piece.box) for piece in held_weights(data)}
        self._local = [piece for piece in self._targets if (piece.name, piece.box) in held]
        far = [piece for piece in self._targets if (piece.name, piece.box) not in held]
        needs = _boxes_by_rank(far, device)
        names = {name for boxes in needs for name in boxes}
        owners = _boxes_by_rank((piece for piece in self._owned() if piece.name in names), device)
        this_rank = dist.get_rank() if dist.is_initialized() else 0
        self._sends: dict[int, list[_Move]] = defaultdict(list)
        self._receives: dict[int, list[_Move]] = defaultdict(list)
        for receiver, wanted in enumerate(needs):
            for sender, owned in enumerate(owners):
                if this_rank not in (sender, receiver):
                    continue
                moves = list(_moves(wanted, owned))
                if this_rank == sender and moves:
                    self._sends[receiver] = moves
                if this_rank == receiver and moves:
                    self._receives[sender] = moves
        _check_complete(far, self._receives)
        self._far: dict[str, list[TensorBox]] = defaultdict(list)
        for piece in far:
            self._far[piece.name].append(piece)

    def _owned(self) -> list[TensorBox]:
        """The weights that this rank would save in a checkpoint of the whole model; those of all ranks are the
        model."""
        pieces = [piece for bucket in self._data.all_buckets for piece in weight_pieces(bucket, bucket.saved_span)]
        # Also the frozen weights of a run whose checkpoints contain only its adapters.
        pieces += parameter_pieces(self._data.frozen_on_first_copy())
        return [piece for piece in pieces if piece.owned]

    @torch.no_grad()
    def run(self) -> int:
        """Copy the present weights; all ranks call this. Returns the bytes that this rank has received."""
        _check_present(self._data)
        self._data.finish_param_sync()
        held = {(piece.name, piece.box): piece.memory for piece in held_weights(self._data)}
        for piece in self._local:
            piece.memory.copy_(held[piece.name, piece.box])
        sources: dict[str, list[TensorBox]] = defaultdict(list)
        for piece in self._owned():
            sources[piece.name].append(piece)
        this_rank = dist.get_rank() if dist.is_initialized() else 0
        for move in self._receives.get(this_rank, ()):
            self._store(move, _values(sources[move.name], move))
        return self._exchange(sources, this_rank)

    def _exchange(self, sources: dict[str, list[TensorBox]], this_rank: int) -> int:
        """Exchange messages in windows; both sides divide their moves in the same way."""
        if not dist.is_initialized():
            return 0
        received_bytes = 0
        sends = {rank: _windows(moves) for rank, moves in self._sends.items() if rank != this_rank}
        receives = {rank: _windows(moves) for rank, moves in self._receives.items() if rank != this_rank}
        rounds = max((len(windows) for windows in [*sends.values(), *receives.values()]), default=0)
        for number in range(rounds):
            operations = []
            arriving: list[tuple[list[_Move], Tensor]] = []
            for rank, windows in sends.items():
                for moves in _messages(windows, number):
                    operations.append(dist.P2POp(dist.isend, self._packed(sources, moves), rank))
            for rank, windows in receives.items():
                for moves in _messages(windows, number):
                    buffer = self._memory_for(moves)
                    arriving.append((moves, buffer))
                    operations.append(dist.P2POp(dist.irecv, buffer, rank))
            for handle in dist.batch_isend_irecv(operations) if operations else ():
                handle.wait()
            for moves, buffer in arriving:
                received_bytes += buffer.nbytes
                for move, values in zip(moves, buffer.split([move.box.numel for move in moves]), strict=True):
                    self._store(move, values.view(move.box.shape))
        return received_bytes

    @property
    def _wire_dtype(self) -> torch.dtype:
        return self._data.all_buckets[0].weights.dtype

    def _packed(self, sources: dict[str, list[TensorBox]], moves: Sequence[_Move]) -> Tensor:
        """The values of a message, one after the other; a single contiguous tensor is not copied."""
        values = [_values(sources[move.name], move).reshape(-1).to(self._wire_dtype) for move in moves]
        return values[0] if len(values) == 1 else torch.cat(values)

    def _memory_for(self, moves: Sequence[_Move]) -> Tensor:
        """Memory to receive a message: the place of its only tensor if it is contiguous, else a buffer."""
        if len(moves) == 1:
            (move,) = moves
            for piece in self._far[move.name]:
                if piece.box.intersect(move.box) == move.box:
                    place = piece.memory[move.box.within(piece.box)]
                    if place.is_contiguous() and place.dtype == self._wire_dtype:
                        return place.view(-1)
        return torch.empty(sum(move.box.numel for move in moves), dtype=self._wire_dtype, device=self._device)

    def _store(self, move: _Move, values: Tensor) -> None:
        """Copy the values of a move into each memory that needs them."""
        for piece in self._far[move.name]:
            common = piece.box.intersect(move.box)
            if common is None:
                continue
            place = piece.memory[common.within(piece.box)]
            part = values[common.within(move.box)]
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)


class LiveWeights:
    """The trained weights with the interface of an open checkpoint; all ranks call ``fill`` with the same names."""

    def __init__(self, data: DataParallel, vocab_size: int, device: torch.device) -> None:
        self._data = data
        self._device = device
        self.state = {"vocab_size": vocab_size}

    def __enter__(self) -> LiveWeights:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def dtype_of(self, name: str = "") -> torch.dtype:
        """The dtype of all weights."""
        return self._data.all_buckets[0].weights.dtype

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the present weights into the memory of each box; a collective call."""
        WeightTransfer(self._data, pieces, self._device).run()


def _check_present(data: DataParallel) -> None:
    """``ConfigError`` if the weights have no memory, because the trainer is offloaded."""
    for bucket in data.all_buckets:
        weights = bucket.weight_shard if bucket.splits_weights else bucket.weights
        if weights.numel() and not weights.untyped_storage().nbytes():
            raise ConfigError("the trained model is offloaded; call Trainer.onload() before its weights are copied")


def _boxes_by_rank(pieces: Iterable[TensorBox], device: torch.device) -> list[dict[str, list[Box]]]:
    """The boxes of each rank's pieces, by name."""
    mine = defaultdict[str, set[Box]](set)
    for piece in pieces:
        mine[piece.name].add(piece.box)
    ordered = {name: sorted((box.start, box.stop) for box in boxes) for name, boxes in sorted(mine.items())}
    return [
        {name: [Box(tuple(start), tuple(stop)) for start, stop in boxes] for name, boxes in json.loads(text).items()}
        for text in gather_from_all_ranks(json.dumps(ordered), device)
    ]


def _moves(wanted: dict[str, list[Box]], owned: dict[str, list[Box]]) -> Iterable[_Move]:
    """The boxes in both, in an order that sender and receiver share."""
    for name, boxes in wanted.items():
        for box in boxes:
            for source in owned.get(name, ()):
                common = box.intersect(source)
                if common is not None and common.numel:
                    yield _Move(name, common)


def _values(pieces: Sequence[TensorBox], move: _Move) -> Tensor:
    """The values of a move, from the piece of this rank that contains it."""
    for piece in pieces:
        if piece.box.intersect(move.box) == move.box:
            return piece.memory[move.box.within(piece.box)]
    raise LayoutError(f"{move.name}: this rank no longer has the box {move.box}; build the transfer again")


def _windows(moves: Sequence[_Move]) -> list[list[_Move]]:
    """Divide moves into windows of at most ``WINDOW_BYTES`` of float32, or one larger move."""
    windows: list[list[_Move]] = []
    room = 0
    for move in moves:
        nbytes = 4 * move.box.numel
        if not windows or nbytes > room:
            windows.append([])
            room = WINDOW_BYTES
        windows[-1].append(move)
        room -= nbytes
    return windows


def _messages(windows: Sequence[list[_Move]], number: int) -> Iterator[list[_Move]]:
    """The messages of a window: each large box alone, which needs no copy, then all small ones together."""
    moves = windows[number] if number < len(windows) else []
    yield from ([move] for move in moves if move.box.numel >= LARGE)
    if small := [move for move in moves if move.box.numel < LARGE]:
        yield small


def _check_complete(far: Sequence[TensorBox], receives: dict[int, list[_Move]]) -> None:
    """``LayoutError`` unless the moves to this rank cover its pieces; moves of one box do not overlap."""
    covered = defaultdict[str, int](int)
    needed = defaultdict[str, int](int)
    for moves in receives.values():
        for move in moves:
            covered[move.name] += move.box.numel
    for name, box in {(piece.name, piece.box) for piece in far}:
        needed[name] += box.numel
    for name, elements in needed.items():
        if covered[name] != elements:
            raise LayoutError(f"{name}: the trained model has {covered[name]} of {elements} elements of this rank")
