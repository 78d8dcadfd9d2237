"""All-to-all of rows with gradients, in two halves, between which other work runs."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron_core.parallel.collectives import start_all_to_all_rows
from megatron_core.parallel.groups import Group
from megatron_core.parallel.rank_local import RankLocal


class RowsHandle(Protocol):
    """The handle of a message."""

    def wait(self) -> object:
        """Wait until the received rows are valid."""


SendRows = Callable[[Tensor, Sequence[int], Sequence[int], Group], tuple[Tensor, RowsHandle]]
"""Functions as ``start_all_to_all_rows``."""
WHILE_ROWS_ARRIVE: RankLocal[list[Callable[[], None]]] = RankLocal(list)
"""Functions that compute something else on this rank while an exchange is in flight; all its ranks call them."""


def hand_over() -> None:
    """Call ``WHILE_ROWS_ARRIVE``, between the start of a message and its wait."""
    for compute in WHILE_ROWS_ARRIVE():
        compute()


def exchange_rows(
    x: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: Group,
    *,
    send_gradients: SendRows = start_all_to_all_rows,
) -> Tensor:
    """``all_to_all_rows``; backward returns each row's gradient to the rank that sent the row."""
    (received,) = RowExchange([x], send, receive, group, send_gradients=send_gradients).wait()
    return received


class RowExchange:
    """``exchange_rows`` of several tensors in two halves, so that computation between them overlaps with it.

    In forward and in backward it calls ``WHILE_ROWS_ARRIVE`` between the halves.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        send: Sequence[int],
        receive: Sequence[int],
        group: Group,
        *,
        send_rows: SendRows = start_all_to_all_rows,
        send_gradients: SendRows = start_all_to_all_rows,
    ) -> None:
        """Start sending ``tensors``, each with the same number of rows."""
        # Two autograd functions instead of one: the graph then has a node at each end of the message, so that backward,
        # too, starts the exchange of gradients before the computation in between and waits for it afterwards.
        self._there = (send_rows, send, receive)
        self._back = (send_gradients, receive, send)
        self._group = group
        self._handles: list[RowsHandle] = []
        self._results: list[Tensor] = []
        self._arriving: tuple[Tensor, ...] = _BeginRows.apply(self, *tensors)

    def wait(self) -> tuple[Tensor, ...]:
        """Return the received rows of each tensor."""
        # autograd refers to this object: no cycle of references
        arriving = self._arriving
        self._arriving = ()
        return _FinishRows.apply(self, *arriving)

    def begin(self, tensors: Sequence[Tensor], *, back: bool = False) -> list[Tensor]:
        """Start sending values, or with ``back`` their gradients; the returned tensors are valid after ``finish``."""
        start, send, receive = self._back if back else self._there
        for x in tensors:
            result, handle = start(x, send, receive, self._group)
            self._results.append(result)
            self._handles.append(handle)
        return self._results

    def finish(self) -> list[Tensor]:
        """Wait for the rows and return them."""
        if self._group.size() > 1:
            # Between start and wait is the only point where other computations can use this rank's time. A rank alone
            # sends nothing, and must not compute others where ranks of other groups do not.
            hand_over()
        for handle in self._handles:
            handle.wait()
        results = self._results
        self._handles = []
        self._results = []
        return results


class _BeginRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *tensors):
        ctx.exchange = exchange
        arriving = exchange.begin(tensors)
        return tuple(rows.view_as(rows) if rows is x else rows for rows, x in zip(arriving, tensors, strict=True))

    @staticmethod
    def backward(ctx, *grads):
        return None, *ctx.exchange.finish()  # ``grads`` are only placeholders with the shapes that autograd expects


class _FinishRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, *arriving):
        ctx.exchange = exchange
        exchange.finish()
        return tuple(rows.view_as(rows) for rows in arriving)

    @staticmethod
    def backward(ctx, *grads):
        ctx.exchange.begin(grads, back=True)
        return None, *grads
