"""Copies of the trained weights in another layout, in memory: each element goes from one owner to its new places."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.checkpoint import Box, TensorBox, parameter_pieces
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.post_training.shared_weights import SharedWeights
from megatron_core.training.state import held_weights, weight_pieces

WINDOW_BYTES = 64 * 2**20
"""Bytes that a rank sends to another one at a time, so that no copy of the whole model is made."""


LARGE = 2**16
"""Elements of a box that is a message of its own: copies of smaller ones cost less than a message. Only such boxes are
handed to other ranks."""


@dataclass(frozen=True)
class _Move:
    """A box of a tensor that a rank sends, equal on the sender and the receiver."""

    name: str
    box: Box


_Places = tuple[Box, list[tuple[Tensor, tuple[slice, ...]]]]
"""A box of a message, and each memory that needs a part of it, with the part's index."""


@dataclass(frozen=True)
class _Arrival:
    """A message from a rank."""

    rank: int
    memory: Tensor | None
    """Receives it without a copy."""
    places: Sequence[_Places]


@dataclass(frozen=True)
class _Round:
    """Messages that are sent together."""

    sends: list[tuple[int, list[Tensor]]]
    """For each message its receiver, and the views that it consists of."""
    receives: list[_Arrival]


@dataclass(frozen=True)
class _Copies:
    """All copies of a transfer, as views of the memory of this rank."""

    targets: list[Tensor]
    sources: list[Tensor]
    rounds: list[_Round]


class WeightTransfer:
    """Fills the memory of ``targets`` with the trained weights whenever ``run`` is called; built once for a layout.

    The plan is computed from the boxes that each rank owns and needs. A box that this rank holds is copied in place;
    of the others, each rank sends the parts that it would save in a checkpoint, or writes them into the memory of the
    other rank if it is ``shared``. Then a rank also writes boxes for ranks that have more to write.
    """

    def __init__(
        self,
        data: DataParallel,
        targets: Iterable[TensorBox],
        device: torch.device,
        shared: SharedWeights | None = None,
    ) -> None:
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
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._sends: dict[int, list[_Move]] = defaultdict(list)
        self._receives: dict[int, list[_Move]] = defaultdict(list)
        for receiver, wanted in enumerate(needs):
            for sender, owned in enumerate(owners):
                if self._rank not in (sender, receiver):
                    continue
                moves = list(_moves(wanted, owned))
                if self._rank == sender and moves:
                    self._sends[receiver] = moves
                if self._rank == receiver and moves:
                    self._receives[sender] = moves
        self._writes_to_others = shared is not None and shared.is_shared and any(needs)
        """Equal on all ranks."""
        if shared is not None and self._writes_to_others:
            far += self._hand_over(shared.first_rank)
        _check_complete(far, self._receives)
        self._copies: _Copies | None = None
        self._known_addresses: list[int] = []
        self._moved_all = False
        far_by_name = defaultdict[str, list[TensorBox]](list)
        for piece in far:
            far_by_name[piece.name].append(piece)
        self._written: dict[int, dict[str, list[TensorBox]]] = {self._rank: far_by_name}
        """By rank and name: the memory that this rank fills without messages."""
        if shared is not None and self._writes_to_others:
            self._written |= shared.pieces_of_others(far)

    def _owned(self) -> list[TensorBox]:
        """The weights that this rank would save in a checkpoint of the whole model; those of all ranks are the
        model."""
        pieces = [piece for bucket in self._data.all_buckets for piece in weight_pieces(bucket, bucket.saved_span)]
        # Also the frozen weights of a run whose checkpoints contain only its adapters.
        pieces += parameter_pieces(self._data.frozen_on_first_copy())
        return [piece for piece in pieces if piece.owned]

    def _hand_over(self, host: int) -> list[TensorBox]:
        """Let ranks that have less to write fill boxes of busier ones; returns the pieces that others fill.

        ``host``: number of this host, equal on its ranks.
        """
        sent = (move.box for moves in self._sends.values() for move in moves)
        load = sum(box.numel for box in (*sent, *(piece.box for piece in self._local)))
        texts = gather_from_all_ranks(json.dumps([load, host]), self._device)
        loads, hosts = zip(*map(json.loads, texts), strict=True)
        handed_keys = set()
        for move, busy, idle in _handed_over(_boxes_by_rank(self._local, self._device), list(loads), hosts):
            if self._rank == idle:
                self._sends[busy].append(move)
            if self._rank == busy:
                self._receives[idle].append(move)
                handed_keys.add((move.name, move.box))
        filled = [piece for piece in self._local if (piece.name, piece.box) in handed_keys]
        self._local = [piece for piece in self._local if (piece.name, piece.box) not in handed_keys]
        return filled

    @torch.no_grad()
    def run(self) -> int:
        """Copy the present weights; all ranks call this. Returns the bytes that this rank has received.

        Weights that the run's checkpoints do not contain, such as those with adapters, never change and are copied
        only once.
        """
        _check_present(self._data)
        self._data.finish_param_sync()
        # To find the views took 7 of 23 ms for a model of 135 million parameters in one process.
        addresses = self._addresses()
        if self._copies is None or addresses != self._known_addresses:
            self._copies = self._views_to_copy()
            self._known_addresses = addresses
        copies = self._copies
        if self._writes_to_others:
            dist.barrier()  # another rank may still sample with its weights
        if copies.targets:
            torch._foreach_copy_(copies.targets, copies.sources)
        for one_round in copies.rounds:
            self._exchange(one_round)
        if self._writes_to_others:
            dist.barrier()
        arrivals = [move for sender, moves in self._receives.items() if sender != self._rank for move in moves]
        if not self._moved_all:
            self._moved_all = True
            self._leave_out_constant()
        return sum(move.box.numel for move in arrivals) * self._wire_dtype.itemsize

    def _addresses(self) -> list[int]:
        """Where the weights are in memory: a program may have exchanged the memory of a parameter."""
        buckets = self._data.all_buckets
        shards = [bucket.weight_shard.data_ptr() for bucket in buckets if bucket.splits_weights]
        parameters = [p.data_ptr() for bucket in buckets if not bucket.splits_weights for p in bucket.parameters]
        return [*shards, *parameters, *(parameter.data_ptr() for _, parameter in self._data.frozen)]

    def _leave_out_constant(self) -> None:
        is_saved = self._data.is_saved
        size = len(self._local), sum(map(len, (*self._sends.values(), *self._receives.values())))
        self._local = [piece for piece in self._local if is_saved(piece.name)]
        for moves_of_rank in (self._sends, self._receives):
            for rank, moves in moves_of_rank.items():
                moves_of_rank[rank] = [move for move in moves if is_saved(move.name)]
        if size != (len(self._local), sum(map(len, (*self._sends.values(), *self._receives.values())))):
            self._copies = None

    def _views_to_copy(self) -> _Copies:
        """Find the views of all boxes, and divide the messages into rounds, in the same way on both sides."""
        views = {}
        sources: dict[str, list[TensorBox]] = defaultdict(list)
        for piece in held_weights(self._data):
            views[piece.name, piece.box] = piece.memory
            sources[piece.name].append(piece)
        copies = _Copies([piece.memory for piece in self._local], [views[p.name, p.box] for p in self._local], [])
        for receiver, pieces in self._written.items():
            for move in self._sends.get(receiver, ()):
                values = _values(sources[move.name], move)
                for target, index in _places(pieces, move):
                    copies.targets.append(target)
                    copies.sources.append(values[index])
        sends = {rank: _windows(moves) for rank, moves in self._sends.items() if rank not in self._written}
        receives = {rank: _windows(moves) for rank, moves in self._receives.items() if rank not in self._written}
        for number in range(max(map(len, (*sends.values(), *receives.values())), default=0)):
            one_round = _Round([], [])
            for rank, windows in sends.items():
                for moves in _messages(windows, number):
                    one_round.sends.append((rank, [_values(sources[move.name], move) for move in moves]))
            for rank, windows in receives.items():
                for moves in _messages(windows, number):
                    places = [(move.box, list(_places(self._written[self._rank], move))) for move in moves]
                    one_round.receives.append(_Arrival(rank, self._place_of(places), places))
            copies.rounds.append(one_round)
        return copies

    def _place_of(self, places: Sequence[_Places]) -> Tensor | None:
        """The memory into which a message of one box can be received, if it needs the whole box in one place."""
        if len(places) == 1:
            ((box, of_box),) = places
            for target, _ in of_box:
                if tuple(target.shape) == box.shape and target.is_contiguous() and target.dtype == self._wire_dtype:
                    return target.view(-1)
        return None

    def _exchange(self, one_round: _Round) -> None:
        """Exchange the messages of a round."""
        operations = []
        arriving: list[tuple[_Arrival, Tensor]] = []
        for rank, views in one_round.sends:
            values = [view.reshape(-1).to(self._wire_dtype) for view in views]
            # A single contiguous tensor is not copied.
            packed = values[0] if len(values) == 1 else torch.cat(values)
            operations.append(dist.P2POp(dist.isend, packed, rank))
        for message in one_round.receives:
            buffer = message.memory
            if buffer is None:
                size = sum(box.numel for box, _ in message.places)
                buffer = torch.empty(size, dtype=self._wire_dtype, device=self._device)
            arriving.append((message, buffer))
            operations.append(dist.P2POp(dist.irecv, buffer, message.rank))
        for handle in dist.batch_isend_irecv(operations) if operations else ():
            handle.wait()
        for message, buffer in arriving:
            sizes = [box.numel for box, _ in message.places]
            for (box, places), values in zip(message.places, buffer.split(sizes), strict=True):
                shaped = values.view(box.shape)
                for target, index in places:
                    if target.data_ptr() != shaped[index].data_ptr():
                        target.copy_(shaped[index])

    @property
    def _wire_dtype(self) -> torch.dtype:
        return self._data.all_buckets[0].weights.dtype


class LiveWeights(AbstractContextManager["LiveWeights"]):
    """The trained weights with the interface of an open checkpoint; all ranks call ``fill`` with the same names."""

    def __init__(self, data: DataParallel, vocab_size: int, device: torch.device) -> None:
        self._data = data
        self._device = device
        self.state = {"vocab_size": vocab_size}

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


def _handed_over(
    local_boxes: list[dict[str, list[Box]]], loads: list[int], hosts: Sequence[int]
) -> Iterator[tuple[_Move, int, int]]:
    """The boxes that an idle rank writes for a busy one of its host, with both ranks; both hold the box.

    ``local_boxes``: by rank, the boxes that it copies from its own weights. ``loads``: by rank, the elements that it
    writes; updated.
    """
    holders = defaultdict[tuple[int, _Move], list[int]](list)
    for rank, boxes_by_name in enumerate(local_boxes):
        for name, boxes in boxes_by_name.items():
            for box in boxes:
                if box.numel >= LARGE:
                    holders[hosts[rank], _Move(name, box)].append(rank)
    for (_, move), ranks in sorted(holders.items(), key=lambda item: -item[0][1].box.numel):
        for busy in sorted(ranks, key=loads.__getitem__, reverse=True):
            idle = min(ranks, key=loads.__getitem__)
            if loads[idle] + move.box.numel < loads[busy]:
                loads[busy] -= move.box.numel
                loads[idle] += move.box.numel
                yield move, busy, idle


def _values(pieces: Sequence[TensorBox], move: _Move) -> Tensor:
    """The values of a move, from the piece of this rank that contains it."""
    for piece in pieces:
        if piece.box.intersect(move.box) == move.box:
            return piece.memory[move.box.within(piece.box)]
    raise LayoutError(f"{move.name}: this rank no longer has the box {move.box}; build the transfer again")


def _places(pieces: dict[str, list[TensorBox]], move: _Move) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """The memory in ``pieces`` that needs a part of a move, and the part's index in it."""
    for piece in pieces[move.name]:
        common = piece.box.intersect(move.box)
        if common is not None:
            yield piece.memory[common.within(piece.box)], common.within(move.box)


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
