"""State of groups of replicas: in checkpoints the global weights as the model, and the state of each group; in copies
in host memory also outer gradients that are in flight."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import torch

from megatron_core.checkpoint import CheckpointReader, TensorBox, parameter_pieces, pieces_of
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import CheckpointError
from megatron_core.features.outer_steps.optimizer import Fragment, OuterOptimizer
from megatron_core.optimizer.rule import write_copy
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel.sharding import spec_of
from megatron_core.training.driver import gather_weights
from megatron_core.training.loading import shapes_of_all
from megatron_core.training.state import optimizer_pieces, saved_pieces, weight_pieces

IN_FLIGHT = "outer_in_flight"
"""Fragments whose mean is stored, but not applied."""
SENT = "outer_sent"
"""Fragments whose outer gradients are in a copy in host memory, to be sent again."""
GROUP = "outer_group"
"""The number, in the job, of the group that has written a copy in host memory."""


def pieces_of_group(
    pieces: Iterable[TensorBox], optimizer: Optimizer, group: int, *, with_frozen: bool = False
) -> Iterator[TensorBox]:
    """Rename the weights and optimizer state of this rank's group; frozen weights are those of the first group, or of
    each group ``with_frozen``.

    Weights of 16 bits are left out, because they follow from the main weights.
    """
    trained = {f"model.{name}": shard for shard in optimizer.shards for name in shard.bucket.names}
    for piece in pieces:
        if piece.name.startswith("optimizer.") or (piece.name in trained and not trained[piece.name].is_narrow):
            yield replace(piece, name=f"group{group}.{piece.name}")
        elif piece.name not in trained and (group == 0 or with_frozen):
            yield piece


def global_pieces(outer: OuterOptimizer, *, weights_only: bool = False) -> Iterator[TensorBox]:
    """The global weights, as those of a run without groups, and the state of their optimizer; from the first group."""
    if outer.groups.outer.rank():
        return
    for fragment in outer.fragments:
        fragment.arrive()
        yield from _pieces(fragment, "weights", "model", narrow=True)
        if not weights_only:
            yield from _state(fragment, fragment.in_flight)


def _state(fragment: Fragment, in_flight: bool) -> Iterator[TensorBox]:
    """Main weights of 16-bit weights, momentum, and the mean of an exchange that is not applied."""
    if any(piece.shard.is_narrow for piece in fragment.pieces):
        yield from _pieces(fragment, "weights", "optimizer.main")
    yield from _pieces(fragment, "momentum", "outer.momentum")
    if in_flight:
        yield from _pieces(fragment, "mean", "outer.mean")


def _pieces(fragment: Fragment, name_of_state: str, prefix: str, *, narrow: bool = False) -> Iterator[TensorBox]:
    """Boxes ``PREFIX.NAME`` of a flat tensor of ``fragment``; ``narrow``: converted to the dtype of the model's
    weights."""
    for (_, name, parameter, start, stop, _), flat in fragment.parts(getattr(fragment, name_of_state)):
        flat = flat.to(parameter.dtype) if narrow else flat
        yield from pieces_of(f"{prefix}.{name}", spec_of(parameter), tuple(parameter.shape), start, stop, flat)


def copied_pieces(
    pieces: Iterable[TensorBox], optimizer: Optimizer, outer: OuterOptimizer, group: int
) -> Iterator[TensorBox]:
    """The pieces of this rank in a copy of the state before a step: those of ``group``, and its part of the global
    weights and of their state.

    An exchange in flight is not awaited: the group's outer gradient is copied.
    """
    yield from pieces_of_group(pieces, optimizer, group, with_frozen=True)
    for fragment in outer.fragments:
        yield from _pieces(fragment, "weights", "outer.weights")
        yield from _pieces(fragment, "momentum", "outer.momentum")
        if fragment.sent is not None:
            yield from _pieces(fragment, "sent", f"group{group}.outer.sent")
        elif fragment.in_flight:
            yield from _pieces(fragment, "mean", "outer.mean")


def load_copy(reader: StateReader, data: DataParallel, optimizer: Optimizer, outer: OuterOptimizer) -> None:
    """Load a copy in host memory, and send the outer gradients again that were in flight.

    If it is the copy of another group, this one starts with the global weights and the other's optimizer state. Its own
    state from before it was left out is not used: it belongs to an earlier step than Adam's bias correction.
    """
    for fragment in outer.fragments:
        fragment.message = None
        fragment.in_flight = fragment.number in reader.state[IN_FLIGHT]
        sent = fragment.number in reader.state[SENT]
        fragment.sent = torch.zeros_like(fragment.weights) if sent else None
        if fragment.in_flight and not sent:
            fragment.mean = torch.zeros_like(fragment.weights)
    weights = (piece for bucket in data.all_buckets for piece in weight_pieces(bucket))
    stored = chain(saved_pieces(data, chain(weights, parameter_pieces(data.frozen))), optimizer_pieces(optimizer))
    reader.fill(copied_pieces(stored, optimizer, outer, reader.state[GROUP]))
    if reader.state[GROUP] != outer.number:
        outer.start_from_global_weights()
    _restore_optimizer(reader, data, optimizer)
    for fragment in outer.fragments:
        if fragment.sent is not None:
            outer.send(fragment, fragment.sent.clone())


def load_groups(reader: CheckpointReader, data: DataParallel, optimizer: Optimizer, outer: OuterOptimizer) -> None:
    """Load this rank's group and its part of the global weights; ``CheckpointError`` if the fragments differ."""
    in_flight = reader.state[IN_FLIGHT]
    if not isinstance(in_flight, list) or not set(in_flight) <= set(range(len(outer.fragments))):
        raise CheckpointError(
            f"{reader.folder}: {IN_FLIGHT}={in_flight} are not fragments of this run, which has "
            f"{len(outer.fragments)}; give the same --outer-fragments and --outer-delay"
        )
    # The state of this rank's group.
    shards = [piece for bucket in data.buckets for piece in weight_pieces(bucket)]
    pieces = list(pieces_of_group([*shards, *optimizer_pieces(optimizer)], optimizer, outer.groups.outer.rank()))
    # Frozen weights, which are stored once for all groups.
    frozen = chain.from_iterable(weight_pieces(bucket) for bucket in data.frozen_buckets)
    pieces += saved_pieces(data, chain(parameter_pieces(data.frozen), frozen))
    # The global weights and their state.
    for fragment in outer.fragments:
        fragment.message = None
        fragment.sent = None
        fragment.in_flight = fragment.number in in_flight
        fragment.mean = torch.zeros_like(fragment.weights) if fragment.in_flight else fragment.mean
        pieces += _pieces(fragment, "weights", "model")  # read from the main weights if there are any
        pieces += [
            piece for piece in _state(fragment, fragment.in_flight) if not piece.name.startswith("optimizer.main.")
        ]
    reader.check_names(shapes_of_all(pieces, data.device))
    reader.fill_together(pieces, data.device)
    _restore_optimizer(reader, data, optimizer)


def _restore_optimizer(reader: StateReader, data: DataParallel, optimizer: Optimizer) -> None:
    """Compute weights from loaded shards, and restore the counters of ``optimizer``."""
    optimizer.forget_local_changes()
    for shard in optimizer.shards:
        write_copy(shard.whole)
    gather_weights([data])
    optimizer.set_steps_taken(reader.state["optimizer_steps"])
    optimizer.loss_scale.load_state_dict(reader.state["loss_scale"])
