"""Send tokens to the ranks of their experts, and the outputs of the experts back.

All ranks of a pipeline stage have different tokens. The ranks of the group ``etp-ep`` together hold all experts: each
of the ep parts of the experts is on etp ranks; each of these ranks needs the tokens of the experts and returns a
partial sum of their outputs.

Shapes: T tokens of this rank, k choices per token, R input rows for this rank's experts.
"""

# A token's outputs are summed on its own rank in the order of its choices, so that the sum does not depend on the order
# of arrival. Ranks without tokens also call all collectives: the other ranks wait for them.

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor

from megatron_core.features.experts.counts import ArrivingCounts
from megatron_core.features.experts.grouped import runs
from megatron_core.features.experts.grouped_linear import Chunks, TokenNumbers
from megatron_core.features.experts.router import Routing
from megatron_core.features.experts.row_exchange import RowExchange, SendRows, exchange_rows
from megatron_core.ops.rows import copied_to
from megatron_core.parallel.collectives import (
    all_reduce_,
    all_to_all_rows,
    gather_from_sequence,
    reduce_scatter_to_sequence,
    start_all_to_all_rows,
)
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.tree_sum import tree_sum


@dataclass(frozen=True)
class Dispatched:
    """The input rows for this rank's experts, ordered by expert."""

    rows: Tensor
    """``[R, h]``."""
    probs: Tensor
    """``[R]``, the factor on the output of each row."""
    counts: list[int]
    """Number of rows of each local expert."""
    combine: Callable[[Tensor], Tensor]
    """Function from the experts' outputs ``[R, h]``, already multiplied by ``probs``, to the outputs of this rank's
    tokens ``[T, h]``."""
    chunks: Chunks | None = None
    """The rows of each expert by chunks of sequences, if tokens have ``TokenNumbers``."""


class _Take(torch.autograd.Function):
    """Select rows of ``x`` by ``index``; -1 selects a row of zeros.

    For each row of ``x``, backward sums the gradients at ``places`` ``[rows of x, m]`` in this fixed order (-1: zeros);
    an index_add would sum in any order. ``total`` computes the sums, ``[rows of x, m, ...]`` -> ``[rows of x, ...]``.
    """

    @staticmethod
    def forward(ctx, x, index, places, holes, total):
        ctx.save_for_backward(index, places)
        ctx.holes = holes
        ctx.total = total
        return _rows(x, index, holes)

    @staticmethod
    def backward(ctx, grad):
        index, places = ctx.saved_tensors
        return _SumTaken.apply(grad, places, index, ctx.holes, ctx.total), None, None, None, None


class _SumTaken(torch.autograd.Function):
    """The adjoint of ``_Take``."""

    @staticmethod
    def forward(ctx, rows, places, index, holes, total):
        ctx.save_for_backward(index, places)
        ctx.holes = holes
        ctx.total = total
        return total(_rows(rows, places.flatten(), holes).unflatten(0, places.shape))

    @staticmethod
    def backward(ctx, grad):
        index, places = ctx.saved_tensors
        return _Take.apply(grad, index, places, ctx.holes, ctx.total), None, None, None, None


def _plain_total(slots: Tensor) -> Tensor:
    return slots.sum(1)


def _total_of_choices(slots: Tensor, copies: int) -> Tensor:
    """The sum of ``[T, m, ...]``: the tree over the ``copies`` ranks of each choice, then the choices in order."""
    return reduce(torch.add, (tree_sum(choice.unbind(1)) for choice in slots.split(copies, 1)))


def _rows(x: Tensor, index: Tensor, holes: bool) -> Tensor:
    if holes:
        # So -1 selects a row of zeros without a test of every index.
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        index = index % x.shape[0]  # -1 is the last row
    return x.index_select(0, index)


class Dispatcher:
    """Base class of the dispatchers: the assignment of experts to ranks.

    ``dispatch`` of a subclass sends ``x`` ``[T, h]`` to the chosen experts. ``padded``: messages and the rows of each
    expert are padded to ``routing.capacity``. ``meanwhile`` is called during the communication. ``once``: numbers that
    the layers of one forward share. ``axes``: those of the group; ``ep`` if the ranks of etp have the same tokens.
    """

    def __init__(self, groups: ParallelGroups, num_experts: int, axes: str = "etp-ep") -> None:
        self.group = groups.group(axes)
        self.size = self.group.size()
        self.local_experts = num_experts // groups.size("ep")
        self.own_part = groups.index("ep")
        members = [groups.grid.coordinates(rank)["ep"] for rank in groups.ranks(axes)]
        self.holders = [
            [i for i, part_of_rank in enumerate(members) if part_of_rank == number]
            for number in range(groups.size("ep"))
        ]
        """For each part of the experts, the indices in the group of the ranks with this part."""
        self._holders: Tensor | None = None


class AllToAll(Dispatcher):
    """Send each token only to the ranks of its experts.

    ``send_tokens`` sends tokens to experts, ``send_gradients`` the gradients of experts' outputs, in backward.
    """

    send_tokens: SendRows = staticmethod(start_all_to_all_rows)
    send_gradients: SendRows = staticmethod(start_all_to_all_rows)

    def dispatch(
        self,
        x: Tensor,
        routing: Routing,
        *,
        padded: bool = False,
        meanwhile: Callable[[], None] | None = None,
        numbers: TokenNumbers | None = None,
        once: dict[str, int] | None = None,
    ) -> Dispatched:
        """See ``Dispatcher``; one all-to-all to the experts, one all-to-all back."""
        keys = self._destinations(routing, x.device)
        # With padding all sizes are known in advance, so that no counts are exchanged and the host does not wait.
        capacity = routing.capacity if padded else None
        slots = Slots.of(keys, self.size * self.local_experts, capacity, drops=routing.kept is not None)
        arriving = None
        if capacity is None:
            # Started before the rows are gathered, which hides its latency.
            arriving = ArrivingCounts(slots.counts.view(self.size, self.local_experts), self.group)
        tokens = slots.owners(keys.shape[1])
        copies = len(self.holders[0])
        total = _plain_total if numbers is None else partial(_total_of_choices, copies=copies)
        rows = _Take.apply(x, tokens, slots.places, slots.holes, total)
        places = slots.places.view(-1, copies)
        probs = _Take.apply(routing.probs.flatten(), slots.owners(copies), places, slots.holes, total)
        # Of each rank, the rows for each expert that are sent to it, and those received from it.
        padded_counts = [[capacity or 0] * self.local_experts] * self.size
        send, receive = (padded_counts, padded_counts) if arriving is None else arriving.wait()
        sent, received = ([sum(counts) for counts in table] for table in (send, receive))
        if slots.holes and capacity is None:  # dropped choices are the last rows
            rows, probs, tokens = (tensor[: sum(sent)] for tensor in (rows, probs, tokens))
        # The probabilities travel with the rows: the expert's rank multiplies by them, so that the sender only sums and
        # need not keep the outputs for their gradients.
        exchange = RowExchange([rows, probs], sent, received, self.group, send_rows=self.send_tokens)
        if meanwhile is not None:
            meanwhile()
        rows, probs = exchange.wait()
        counts = [sum(column) for column in zip(*receive, strict=True)]
        chunks = None
        order, inverse = self._by_expert(arriving, capacity, sum(received), x.device)
        if numbers is not None:
            local = torch.where(tokens < 0, -1, numbers.of_tokens[tokens])  # -1 is padding
            order, chunks = _by_number(all_to_all_rows(local, sent, received, self.group), order, counts, numbers.chunk)
            inverse = _inverse(order)
        if order is not None:
            rows = _Take.apply(rows, order, inverse[:, None], False, _plain_total)
            probs = probs.index_select(0, order)

        def combine(outputs: Tensor) -> Tensor:
            if order is not None:
                outputs = _Take.apply(outputs, inverse, order[:, None], False, _plain_total)
            outputs = exchange_rows(outputs, received, sent, self.group, send_gradients=self.send_gradients)
            return _SumTaken.apply(outputs, slots.places, tokens, slots.holes, total)

        return Dispatched(rows, probs, counts, combine, chunks)

    def _destinations(self, routing: Routing, device: torch.device) -> Tensor:
        """Return the destination rank * local_experts + local expert of each choice and each rank of its expert.

        The shape is ``[T, k etp]``; dropped choices have the value group size * local_experts.
        """
        holders = self._holders_on(device)  # [ep, etp]
        ranks = holders[routing.experts // self.local_experts]
        local = routing.experts % self.local_experts
        # Sorted by this key, rows are ordered by rank and within it by expert, as messages and experts need them.
        keys = ranks * self.local_experts + local[..., None]
        if routing.kept is not None:
            keys = keys.masked_fill(~routing.kept[..., None], self.size * self.local_experts)
        return keys.flatten(1)

    def _holders_on(self, device: torch.device) -> Tensor:
        """``holders`` on the device, copied once."""
        if self._holders is None or self._holders.device != device:
            self._holders = copied_to(self.holders, torch.int64, device)
        return self._holders

    def _by_expert(
        self, arrived: ArrivingCounts | None, capacity: int | None, rows: int, device: torch.device
    ) -> tuple[Tensor | None, Tensor]:
        """Return the permutation from rows ordered by sender to rows ordered by expert, and its inverse.

        ``arrived`` has the numbers of the ``rows`` received, or all are ``capacity``.
        """
        # Rows of one sender, or for one expert, are in order.
        if self.size == 1 or self.local_experts == 1:
            return None, torch.empty(0)
        expert = torch.arange(self.local_experts, device=device).repeat(self.size)
        lengths = torch.full_like(expert, capacity or 0) if arrived is None else arrived.theirs.flatten()
        # ``output_size`` is known on the host; without it, torch would wait for the device to learn it.
        order = expert.repeat_interleave(lengths, output_size=rows).argsort(stable=True)
        return order, _inverse(order)


class AllGatherDispatcher(Dispatcher):
    """Gather all tokens on all ranks of the group, and reduce-scatter the partial sums over experts."""

    def dispatch(
        self,
        x: Tensor,
        routing: Routing,
        *,
        padded: bool = False,
        meanwhile: Callable[[], None] | None = None,
        numbers: TokenNumbers | None = None,
        once: dict[str, int] | None = None,
    ) -> Dispatched:
        """See ``Dispatcher``; all-gather, then reduce-scatter; ``meanwhile`` must be None."""
        assert meanwhile is None, "validation refuses moe_shared_expert_overlap with allgather"
        assert numbers is None, "validation refuses layout_invariant with allgather"
        local_rows = x.shape[0]
        # A gather needs equal sizes, and ranks may have a different number of tokens. All layers of a forward have the
        # same tokens, so that the host waits for the largest number only once.
        once = {} if once is None else once
        if "longest" not in once:
            # Unlike ``torch.tensor``, without a copy from the host.
            longest = torch.full((), local_rows, device=x.device)
            all_reduce_(longest, self.group, maximum=True)
            once["longest"] = int(longest)
        missing = once["longest"] - local_rows

        def gathered(tensor: Tensor, fill: float = 0) -> Tensor:
            tail = tensor.new_full((missing, *tensor.shape[1:]), fill)
            return gather_from_sequence(torch.cat([tensor, tail]) if missing else tensor, self.group)

        experts = routing.experts if routing.kept is None else routing.experts.masked_fill(~routing.kept, -1)
        with torch.no_grad():
            experts = gathered(experts, -1)
        keys = experts - self.own_part * self.local_experts
        keys = keys.masked_fill((experts < 0) | (keys < 0) | (keys >= self.local_experts), self.local_experts)
        capacity = routing.capacity * self.size if padded and routing.capacity is not None else None
        slots = Slots.of(keys, self.local_experts, capacity, drops=True)
        inputs = gathered(x)
        input_probs = gathered(routing.probs).flatten()
        if capacity is None:
            counts = slots.counts.tolist()  # waits for the device, while it gathers
            slots = replace(slots, rows=slots.rows[: sum(counts)])
        else:
            counts = [capacity] * self.local_experts
        tokens = slots.owners(keys.shape[1])
        rows = _Take.apply(inputs, tokens, slots.places, True, _plain_total)
        probs = _Take.apply(input_probs, slots.rows, slots.places.view(-1, 1), True, _plain_total)

        def combine(outputs: Tensor) -> Tensor:
            total = _SumTaken.apply(outputs, slots.places, tokens, True, _plain_total)
            return reduce_scatter_to_sequence(total, self.group)[:local_rows]

        return Dispatched(rows, probs, counts, combine)


@dataclass(frozen=True)
class Slots:
    """The m slots of each token, one per choice and rank of its expert, sorted by destination."""

    rows: Tensor
    """``[R]``, the slot index of each row, in the flat ``[T, m]`` order; -1 for padding. Without padding all T m slots,
    the dropped ones last."""
    places: Tensor
    """``[T, m]``, the row of each slot; -1 for dropped choices."""
    counts: Tensor
    """Number of rows of each destination, int64 on the device."""
    holes: bool
    """Whether ``rows`` or ``places`` may contain -1."""

    @classmethod
    def of(cls, keys: Tensor, destinations: int, capacity: int | None, *, drops: bool) -> "Slots":
        """Sort slots by their destinations ``keys`` ``[T, m]``, stably; the key ``destinations`` means dropped.

        With ``capacity``, each destination has exactly ``capacity`` rows, with padding at the end. ``drops``: whether
        slots may be dropped. The host does not wait for the device.
        """
        flat = keys.flatten()
        # Stable: tokens of an expert stay in the order of positions, so sums over them have one order.
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(destinations + 1).scatter_add_(0, flat, torch.ones_like(flat))  # bincount waits on GPUs
        if capacity is None:
            places = _inverse(order)
            if drops:
                places = places.masked_fill(flat == destinations, -1)
            return cls(order, places.view_as(keys), counts[:destinations], drops)
        first = counts.cumsum(0) - counts
        key = flat[order]
        row = key * capacity + torch.arange(flat.numel(), device=flat.device) - first[key]
        row = row.masked_fill(key == destinations, destinations * capacity)
        rows = flat.new_full((destinations * capacity + 1,), -1).scatter_(0, row, order)[:-1]
        places = torch.empty_like(flat).scatter_(0, order, row.masked_fill(key == destinations, -1))
        return cls(rows, places.view_as(keys), torch.full_like(counts[:destinations], capacity), True)

    def owners(self, count: int) -> Tensor:
        """Return slot index // ``count`` of each row, such as its token (``count`` = m), ``[R]``; -1 for padding."""
        return torch.where(self.rows < 0, -1, self.rows // count) if self.holes else self.rows // count


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def _by_number(numbers: Tensor, order: Tensor | None, counts: Sequence[int], chunk: int) -> tuple[Tensor, Chunks]:
    """Return the permutation from received rows to rows ordered by expert, then by number, and their chunks.

    ``numbers`` ``[R]`` are those of the received rows; ``order`` is the permutation to rows ordered by expert.
    """
    numbers = numbers if order is None else numbers[order]
    permutations = []
    experts = []
    of_expert = []
    for run in runs(counts):
        ascending, order_in_run = numbers[run].sort(stable=True)
        permutations.append(order_in_run + run.start)
        experts.append(run)
        padding = int((ascending < 0).sum())
        sizes = torch.unique_consecutive(ascending[padding:] // chunk, return_counts=True)[1].tolist()
        of_expert.append(
            tuple(slice(run.start + padding + piece.start, run.start + padding + piece.stop) for piece in runs(sizes))
        )
    by_number = torch.cat(permutations)
    return by_number if order is None else order[by_number], Chunks(tuple(experts), tuple(of_expert))
