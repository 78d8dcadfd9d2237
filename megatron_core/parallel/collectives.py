"""Collectives over a group: plain, and as autograd functions whose backward is the adjoint collective.

Shapes: dim 0 is the sequence, the last dim the channels. A group of one rank returns its input. The autograd pairs are
f and g of Shoeybi et al. 2019 (figure 3) and their sequence-parallel forms of Korthikanti et al. 2022 (figures 5 and
6): each backward is the adjoint of its forward, seen as a linear map over all ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.compiled import CollectiveOperator, group_named
from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.parallel.groups import Group, process_group
from megatron_core.parallel.handles import All, Done, Handle, SummedAfter
from megatron_core.parallel.meter import METER
from megatron_core.parallel.watched import watched_move, watched_sum

# torch renamed both; older releases have only the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Collective = Callable[[Tensor, Group], Tensor]


def _share(group: Group) -> float:
    """Fraction of a tensor that each of n ranks sends in a ring algorithm: (n - 1) / n."""
    return 1.0 - 1.0 / group.size()


def all_reduce_(x: Tensor, group: Group, *, maximum: bool = False, async_op: bool = False) -> Handle:
    """Sum ``x`` (or take its maximum) over the group in place; with ``async_op``, wait on the handle before use."""
    if group.size() == 1:
        return Done()
    # Recorded before the call: if it hangs, the watchdog must name it.
    RECORDER.note("all-reduce", process_group(group), x)
    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    # A ring sums in one pass around and distributes the result in another.
    sent = 2 * _share(group) * x.nbytes
    call = partial(dist.all_reduce, x, op=op, group=group, async_op=async_op)
    watched = watched_sum(call, "all-reduce", group, x, x, maximum=maximum)
    return METER.run("all_reduce", group, sent, watched) or Done()


def broadcast_(x: Tensor, source: int, group: Group) -> None:
    """Broadcast ``x`` from the global rank ``source``, in place."""
    if group.size() == 1:
        return
    members = process_group(group)
    RECORDER.note("broadcast", members, x)
    # torch's broadcast has the source's global rank, and the observer the index in the group.
    root = dist.get_group_rank(members, source)
    call = partial(dist.broadcast, x, src=source, group=members)
    sent = lambda: ([x] if group.rank() == root else [None]) * group.size()  # noqa: E731
    watched = watched_move(call, "broadcast", group, x, sent, lambda: _only(root, x, group))
    METER.run("broadcast", group, x.nbytes, watched)


def all_gather_flat_(full: Tensor, shard: Tensor, group: Group, *, async_op: bool = False) -> Handle:
    """Gather every rank's ``shard`` [n] into ``full`` [n * size], in rank order."""
    if group.size() == 1:
        return Done()
    RECORDER.note("all-gather", process_group(group), shard)
    call = partial(_all_gather, full, shard, group=group, async_op=async_op)
    size = group.size()
    watched = watched_move(call, "all-gather", group, shard, lambda: [shard] * size, lambda: full.view(-1).chunk(size))
    return METER.run("all_gather", group, _share(group) * full.nbytes, watched) or Done()


def reduce_scatter_flat_(shard: Tensor, full: Tensor, group: Group, *, async_op: bool = False) -> Handle:
    """Sum ``full`` [n * size] over the group and store this rank's part in ``shard`` [n]."""
    if group.size() == 1:
        return Done()
    RECORDER.note("reduce-scatter", process_group(group), full)
    call = partial(_reduce_scatter, shard, full, group=group, async_op=async_op)
    watched = watched_sum(call, "reduce-scatter", group, full, shard)
    return METER.run("reduce_scatter", group, _share(group) * full.nbytes, watched) or Done()


def reduce_scatter_wide_(shard: Tensor, full: Tensor, group: Group) -> SummedAfter:
    """``reduce_scatter_flat_`` for 16-bit messages with a sum in float32.

    The messages are sent by an all-to-all of the same size; the sum is computed in ``wait``.
    """
    # An all-to-all moves the unrounded 16-bit terms, and each rank adds its own in float32. A ring of additions in
    # bfloat16 would round once for each rank.
    ones = [1] * group.size()
    received, handle = start_all_to_all_rows(full.view(group.size(), -1), ones, ones, group)
    return SummedAfter(handle, received, shard)


def all_to_all_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send ``send[i]`` rows of ``x`` to rank i and return the rows received, ``receive[i]`` from rank i, both in rank
    order.

    Row counts may differ between ranks and may be 0.
    """
    received, handle = start_all_to_all_rows(x, send, receive, group)
    handle.wait()
    return received


def start_all_to_all_rows(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group
) -> tuple[Tensor, Handle]:
    """Start ``all_to_all_rows``; the result is valid after the handle's ``wait``."""
    if group.size() == 1:
        return x, Done()
    # Autograd gives expanded and transposed gradients, whose memory no backend can send.
    x = x.contiguous()
    received = x.new_empty((sum(receive), *x.shape[1:]))
    RECORDER.note("all-to-all", process_group(group), x[:0])  # the number of rows differs between ranks
    members = process_group(group)
    sent = x.nbytes * (1.0 - send[group.rank()] / max(sum(send), 1))

    def call() -> All:
        # ``All`` keeps ``x``, which may be a temporary copy, alive until the message has left.
        return All([dist.all_to_all_single(received, x, list(receive), list(send), members, async_op=True)], x)

    watched = watched_move(
        call, "all-to-all", group, x, lambda: x.split(list(send)), lambda: received.split(list(receive))
    )
    return received, METER.run("all_to_all", group, sent, watched)


def start_gather_sequence(x: Tensor, group: Group) -> tuple[Tensor, Handle]:
    """Start an all-gather along dim 0; the result [s * size, ...] is valid after ``wait``."""
    if group.size() == 1:
        return x, Done()
    x = x.contiguous()
    full = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    return full, all_gather_flat_(full, x, group, async_op=True)


def start_reduce_scatter_sequence(x: Tensor, group: Group) -> tuple[Tensor, Handle]:
    """Start a reduce-scatter along dim 0; the result [s / size, ...] is valid after ``wait``."""
    if group.size() == 1:
        return x, Done()
    x = x.contiguous()
    shard = x.new_empty((_part(x.shape[0], group), *x.shape[1:]))
    return shard, reduce_scatter_flat_(shard, x, group, async_op=True)


def start_ring_shift(x: Tensor, group: Group, *, step: int = 1, out: Tensor | None = None) -> tuple[Tensor, Handle]:
    """Start sending ``x`` to the rank ``step`` places further in the ring; the result (``out``, if given), the ``x`` of
    the rank ``step`` places before, is valid after ``wait``."""
    if group.size() == 1:
        return x, Done()
    x = x.contiguous()
    arriving = torch.empty_like(x) if out is None else out
    ring = process_group(group)
    # Both directions are one batch: with separate calls, a ring whose ranks all send first would deadlock under NCCL.
    to, source = ((group.rank() + places) % group.size() for places in (step, -step))
    after, before = (dist.get_global_rank(ring, rank) for rank in (to, source))
    RECORDER.note("ring shift", ring, x)
    operations = [dist.P2POp(dist.isend, x, after, ring), dist.P2POp(dist.irecv, arriving, before, ring)]
    watched = watched_move(
        lambda: All(dist.batch_isend_irecv(operations), x),
        *("ring shift", group, x),
        *(lambda: _only(to, x, group), lambda: _only(source, arriving, group)),
    )
    return arriving, METER.run("ring", group, x.nbytes, watched)


def _only(rank: int, x: Tensor, group: Group) -> list[Tensor | None]:
    """``x`` at ``rank``, None at the other ranks of the group."""
    return [x if member == rank else None for member in range(group.size())]


def start_all_reduce(x: Tensor, group: Group) -> tuple[Tensor, Handle]:
    """Start an in-place sum of ``x`` over the group."""
    x = x.contiguous()
    return x, all_reduce_(x, group, async_op=True)


def _identity(x: Tensor, group: Group) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    if group.size() == 1:
        return x.view_as(x)
    # The sum is in place, and callers may still read ``x``: the input of ``reduce_from_region`` may be saved for
    # backward.
    x = x.clone(memory_format=torch.contiguous_format)
    all_reduce_(x, group)
    return x


def _gather_first(x: Tensor, group: Group) -> Tensor:
    full, handle = start_gather_sequence(x, group)
    handle.wait()
    return full


def _reduce_scatter_first(x: Tensor, group: Group) -> Tensor:
    shard, handle = start_reduce_scatter_sequence(x, group)
    handle.wait()
    return shard


def _split_first(x: Tensor, group: Group) -> Tensor:
    if group.size() == 1:
        return x
    length = _part(x.shape[0], group)
    # A copy: a view would keep the memory of the whole sequence alive as long as one rank's part.
    return x.narrow(0, group.rank() * length, length).contiguous()


def equal_parts(x: Tensor, group: Group) -> tuple[Tensor, ...]:
    """The part of ``x`` along dim 0 for each rank; ``LayoutError`` if they are not equal."""
    return x.split(_part(x.shape[0], group))


def _part(extent: int, group: Group) -> int:
    if extent % group.size():
        raise LayoutError(f"a dim of {extent} cannot be split over {group.size()} ranks; use a multiple of them")
    return extent // group.size()


# Collectives concatenate flat memory in rank order, which is dim 0; another dim has to come first.
def _on_last(op: Collective) -> Collective:
    """Apply a collective of dim 0 along the last dim."""
    return lambda x, group: op(x.movedim(-1, 0), group).movedim(0, -1).contiguous()


_split_last, _gather_last, _reduce_scatter_last = map(_on_last, (_split_first, _gather_first, _reduce_scatter_first))


def _all_to_all(x: Tensor, group: Group) -> Tensor:
    if group.size() == 1:
        return x
    x = x.contiguous()
    result = torch.empty_like(x)
    RECORDER.note("all-to-all", process_group(group), x)
    call = partial(dist.all_to_all_single, result, x, group=process_group(group))
    size = group.size()
    chunks = [flat.view(-1).chunk for flat in (x, result)]
    watched = watched_move(call, "all-to-all", group, x, lambda: chunks[0](size), lambda: chunks[1](size))
    METER.run("all_to_all", group, _share(group) * x.nbytes, watched)
    return result


class _Pair(torch.autograd.Function):
    """A collective whose backward is another collective."""

    @staticmethod
    def forward(ctx, x, group, forward_op, backward_op):
        ctx.group = group
        ctx.forward_op = forward_op
        ctx.backward_op = backward_op
        return forward_op(x, group)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # create_graph=True: collectives are linear, so this is the adjoint of the adjoint
            return _Pair.apply(grad, ctx.group, ctx.backward_op, ctx.forward_op), None, None, None
        return ctx.backward_op(grad, ctx.group), None, None, None


# Names instead of functions, because a graph of torch.compile stores them as constants of the operator.
COLLECTIVES: dict[str, Collective] = {
    "all_to_all": _all_to_all,
    "gather_first": _gather_first,
    "gather_last": _gather_last,
    "identity": _identity,
    "reduce_scatter_first": _reduce_scatter_first,
    "reduce_scatter_last": _reduce_scatter_last,
    "split_first": _split_first,
    "split_last": _split_last,
    "sum": _sum,
}
"""The collectives with an adjoint among them, by name."""


def _collective_of(x: Tensor, group_name: str, name: str, adjoint: str, ranks: int) -> Tensor:
    y = COLLECTIVES[name](x, group_named(group_name))
    shared = y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()  # as that of identity and split_first
    return y.clone() if shared else y  # the output of an operator must not be a view of its input


_operator = CollectiveOperator(_collective_of)


def paired(x: Tensor, group: Group, name: str, adjoint: str) -> Tensor:
    """Apply the collective ``name``; if gradients are enabled, autograd records ``adjoint`` as its backward."""
    if torch.compiler.is_compiling():
        return x if group.size() == 1 else _operator(x, process_group(group), name, adjoint)
    # Evaluation and generation call this for every layer and need no node of a graph.
    if not torch.is_grad_enabled():
        return COLLECTIVES[name](x, group)
    return _Pair.apply(x, group, COLLECTIVES[name], COLLECTIVES[adjoint])


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """Identity; backward sums the gradient over the group."""
    return paired(x, group, "identity", "sum")


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """Sum over the group; backward is the identity."""
    return paired(x, group, "sum", "identity")


def scatter_channels(x: Tensor, group: Group) -> Tensor:
    """Take this rank's part of the last dim; backward gathers."""
    return paired(x, group, "split_last", "gather_last")


def gather_channels(x: Tensor, group: Group) -> Tensor:
    """Gather the last dim; backward takes this rank's part."""
    return paired(x, group, "gather_last", "split_last")


def scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Take this rank's part of dim 0; backward gathers."""
    return paired(x, group, "split_first", "gather_first")


def gather_from_sequence(x: Tensor, group: Group, *, partial_grad: bool = True) -> Tensor:
    """Gather dim 0; backward reduce-scatters partial gradients, or takes this rank's part of a complete gradient."""
    return paired(x, group, "gather_first", "reduce_scatter_first" if partial_grad else "split_first")


def exchange_parts(x: Tensor, group: Group) -> Tensor:
    """All-to-all of equal parts of ``[size, ...]``: part i goes to rank i and arrives from rank i; backward is the
    same."""
    return paired(x, group, "all_to_all", "all_to_all")


def reduce_scatter_to_sequence(x: Tensor, group: Group) -> Tensor:
    """Sum over the group and split dim 0; backward gathers."""
    return paired(x, group, "reduce_scatter_first", "gather_first")
