"""The process group of the backend ``shm``.

A collective is posted when it is called and completed in ``wait``; the callers do the work, without threads. Sums are
computed in rank order, half precision in float32, and have the same bits on every rank. Unsupported operations (gather,
scatter, other reductions and dtypes) run over gloo, which connects on first use.
"""

import copyreg
import ctypes
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.cpu_ranks import interrupt
from megatron_core.cpu_ranks.filled_work import spread
from megatron_core.cpu_ranks.shared_memory.host import Host, exchange_numbers, shared_memory_library
from megatron_core.cpu_ranks.shared_memory.messages import IncomingMessages
from megatron_core.cpu_ranks.shared_memory.work import KINDS, Finished, GroupProcesses, LostRankError, Pending
from megatron_core.parallel.groups import refuse_copy

BARRIER, ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST = range(6)
NO_ENTRY = -1
"""Constants of csrc/cpu/transport/transport.h."""
DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.uint8: 8,
}
"""Dtypes that can be reduced; others can only be moved."""
REDUCTIONS: dict[Any, int] = {dist.ReduceOp.SUM: 0, dist.ReduceOp.MIN: 1, dist.ReduceOp.MAX: 2}
PIECE = 1 << 20
"""Bytes of an all-reduce posted at a time, so that they are still in a cache when they are read."""
MOST_PIECES = 64


def _over_gloo(name: str) -> Callable[..., dist.Work]:
    """A method that runs over gloo on the same ranks."""
    return lambda self, *arguments: getattr(self._gloo, name)(*arguments)


# torch's types overload these methods with signatures that torch itself does not call.
_ProcessGroup: Any = dist.ProcessGroup


class SharedMemoryGroup(_ProcessGroup):
    """A group of ranks on one host; ``ranks`` are their global ranks in group order."""

    def __init__(self, host: Host, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._rank = rank
        self._size = len(ranks)
        self._store = store
        self._timeout = timeout
        self._host = host  # kept, so that its memory stays mapped as long as this group
        self._native: Any = shared_memory_library()
        self._members = GroupProcesses(ranks, [host.peers[member] for member in ranks], timeout, self._native)
        rings = exchange_numbers(store, "rings", self._native.rings(host.endpoint, self._size), rank, self._size)
        if min(rings) < 0:
            raise RuntimeError(f"no shared memory for a group of {self._size} ranks; use --distributed-backend gloo")
        arenas = [host.peers[member].address for member in ranks]
        self._table = ctypes.c_int64 * self._size
        self._group = self._native.group(host.endpoint, self._size, rank, self._table(*arenas), self._table(*rings))
        self._members.group = self._group
        self._messages = IncomingMessages(self._native, self._group, self._members)
        self._pending: deque[Pending] = deque()
        self._lazy_gloo: Any = None

    @property
    def group_name(self) -> str:
        """The name by which torch finds the group; torch's own attribute needs a backend in C++."""
        return str(dist.distributed_c10d._get_process_group_name(self))

    def abort(self) -> None:
        """Let the operations that run over gloo fail; the waits of the others end with ``interrupt.request``."""
        if self._lazy_gloo is not None:
            self._lazy_gloo.abort()

    def getBackendName(self) -> str:
        """The backend's name in torch.distributed."""
        return "shm"

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Sum, minimum or maximum, in place."""
        (x,) = tensors
        dtype = DTYPES.get(x.dtype)
        reduction = REDUCTIONS.get(opts.reduceOp.op)
        if dtype is None or reduction is None:
            return self._gloo.allreduce(tensors, opts)
        address = _bytes_of(x)
        size = x.nbytes
        if size <= 2 * PIECE:
            return self._start(ALL_REDUCE, address, size, address, size, opts, [x], dtype, reduction)
        piece = max(PIECE, -(-size // MOST_PIECES // 64) * 64)
        starts = range(0, size, piece)
        handles: list[dist.Work] = []
        for start in starts:
            length = min(piece, size - start)
            handles.append(
                self._post(ALL_REDUCE, address + start, length, address + start, length, opts, [x], dtype, reduction)
            )
            if not _is_async(opts) and len(handles) > 1:
                handles[-2].wait()
        return self._finish(Finished([x], handles), opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Broadcast from the group's rank ``opts.rootRank``."""
        (x,) = tensors
        address = _bytes_of(x)
        size = x.nbytes
        return self._start(BROADCAST, address, size, address, size, opts, [x], root=opts.rootRank)

    def all_gather_single(self, output: Tensor, x: Tensor, opts: Any) -> dist.Work:
        """Concatenate every rank's ``x``."""
        _check_size(output, x.numel() * self._size, x)
        return self._start(ALL_GATHER, _bytes_of(x), x.nbytes, _bytes_of(output), x.nbytes, opts, [output])

    def reduce_scatter_single(self, output: Tensor, x: Tensor, opts: Any) -> dist.Work:
        """Reduce ``x`` (sum, minimum or maximum) and keep this rank's part."""
        _check_size(x, output.numel() * self._size, output)
        dtype = DTYPES.get(x.dtype)
        reduction = REDUCTIONS.get(opts.reduceOp.op)
        if dtype is None or reduction is None:
            return self._gloo._reduce_scatter_base(output, x, opts)
        addresses = _bytes_of(x), x.nbytes, _bytes_of(output), output.nbytes
        return self._start(REDUCE_SCATTER, *addresses, opts, [output], dtype, reduction)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Send part j of ``x`` to rank j; splits count rows of dim 0 and default to equal parts."""
        splits = (self._splits(x, input_splits), self._splits(output, output_splits))
        return self._start(ALL_TO_ALL, _bytes_of(x), x.nbytes, _bytes_of(output), output.nbytes // self._size, opts,
                           [output], splits=splits)  # fmt: skip

    def barrier(self, opts: Any = None) -> dist.Work:
        """Complete once all ranks have called it."""
        return self._start(BARRIER, None, 0, None, 0, opts, [])

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> dist.Work:
        """Send a copy; complete immediately."""
        (x,) = tensors
        address = _bytes_of(x)
        self._insist(lambda: self._native.send(self._group, receiver, tag, address, x.nbytes), KINDS[-1])
        return Finished([x])

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> dist.Work:
        """Receive the next message of ``sender`` with this tag, in the order of sending."""
        (x,) = tensors
        return self._messages.receive(x, _bytes_of(x), sender, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> dist.Work:
        """Not supported."""
        raise NotImplementedError("the backend shm cannot receive from any rank; give src, or use the backend gloo")

    # Lists of tensors are joined into one tensor.

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into a list; shapes may differ, numbers of elements may not."""
        (x,) = inputs
        (outputs_of_ranks,) = outputs
        flat = x.new_empty(self._size * x.numel())
        work = self.all_gather_single(flat, x, opts)
        return self._finish(Finished(outputs_of_ranks, [work], partial(spread, flat, outputs_of_ranks)), opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """Reduce the list and keep this rank's tensor."""
        (output,) = outputs
        (inputs_of_ranks,) = inputs
        return self.reduce_scatter_single(output, _joined(inputs_of_ranks), opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Send tensor j of ``inputs`` to rank j."""
        flat = outputs[0].new_empty(sum(tensor.numel() for tensor in outputs))
        sizes = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        work = self.all_to_all_single(flat, _joined(inputs), *sizes, opts)
        return self._finish(Finished(outputs, [work], partial(spread, flat, outputs)), opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Reduce each tensor separately."""
        return self._finish(Finished(tensors, [self.allreduce([x], opts) for x in tensors]), opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Gather each tensor separately."""
        pairs = zip(outputs, inputs, strict=True)
        return self._finish(Finished(outputs, [self.all_gather_single(*pair, opts) for pair in pairs]), opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Reduce-scatter each tensor separately."""
        pairs = zip(outputs, inputs, strict=True)
        return self._finish(Finished(outputs, [self.reduce_scatter_single(*pair, opts) for pair in pairs]), opts)

    # torch 2.13 renamed these.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Rare operations.

    gather = _over_gloo("gather")
    scatter = _over_gloo("scatter")
    reduce = _over_gloo("reduce")
    allgather_coalesced = _over_gloo("allgather_coalesced")

    @property
    def _gloo(self) -> Any:
        """A gloo group over the same ranks, created by all of them together on first use."""
        if self._lazy_gloo is None:
            store = dist.PrefixStore("gloo", self._store)
            self._lazy_gloo = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=self._timeout)
        return self._lazy_gloo

    def _start(self, *arguments: Any, **named: Any) -> dist.Work:
        """Post an operation and, unless it is asynchronous, complete it; arguments as for ``_post``."""
        return self._finish(self._post(*arguments, **named), arguments[5])

    def _post(
        self,
        code: int,
        source: int | None,
        size: int,
        target: int | None,
        length: int,
        opts: Any,
        filled: list[Tensor],
        dtype: int = 0,
        reduction: int = 0,
        *,
        root: int = 0,
        splits: tuple[Any, Any] = (None, None),
    ) -> Pending:
        """Expose ``size`` bytes at ``source`` to the other ranks; completion fills ``target``, ``length`` bytes from
        each."""
        native = self._native
        group = self._group
        waits = not _is_async(opts)
        number = native.post(group, code, dtype, reduction, root, source, size, splits[0], waits)
        if number < 0:
            number = self._insist(
                lambda: native.post(group, code, dtype, reduction, root, source, size, splits[0], waits), KINDS[code]
            )

        def attempt(slice_: int) -> int:
            return native.complete(group, number, code, dtype, reduction, root, target, length, splits[1], slice_)

        work = Pending(self._members, KINDS[code], number, attempt, filled)
        limit = opts.timeout.total_seconds() if opts is not None else 0
        if limit > 0:
            work.limit = limit
        return work

    def _finish(self, work: Pending, opts: Any) -> dist.Work:
        """Complete a synchronous ``work``; keep an asynchronous one, because the ring is finite and the caller may drop
        it."""
        if not _is_async(opts):
            work.wait()
        elif not work.done:
            while self._pending and self._pending[0].done:
                self._pending.popleft()
            self._pending.append(work)
        return work

    def _insist(self, post: Callable[[], int], what: str) -> int:
        """Post, waiting for space: first complete the oldest pending operations, then wait until other ranks have
        read."""
        while (number := post()) < 0 and self._pending:
            self._pending.popleft().wait()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while (number := post() if number < 0 else number) < 0:
            if time.monotonic() > deadline:
                raise LostRankError(
                    f"{what} over ranks {self._members.ranks}: the other ranks did not read earlier messages of this "
                    f"rank within {self._timeout.total_seconds():.0f} s, and "
                    + ("its memory is full" if number < NO_ENTRY else "it has too many operations in flight")
                    + "; if they are only slow, raise distributed_timeout_minutes"
                )
            interrupt.raise_if_requested()
            time.sleep(1e-4)
        return number

    def _splits(self, x: Tensor, rows: list[int]) -> Any:
        """Bytes of each rank's part of ``x``; None if they are equal."""
        if not rows:
            if x.dim() and x.shape[0] % self._size:
                raise ValueError(
                    f"all-to-all of {list(x.shape)} over {self._size} ranks: dim 0 is not divisible; give the sizes of "
                    "the parts"
                )
            return None
        if len(rows) != self._size or sum(rows) != x.shape[0]:
            raise ValueError(
                f"all-to-all over {self._size} ranks: {rows} must be {self._size} row counts that sum to {x.shape[0]}"
            )
        row = x.nbytes // x.shape[0] if x.shape[0] else 0
        return self._table(*(row * count for count in rows))


def _is_async(opts: Any) -> bool:
    return opts is None or opts.asyncOp


def _bytes_of(x: Tensor) -> int:
    """Address of the values of ``x``."""
    if x.device.type != "cpu" or x.layout != torch.strided or not x.is_contiguous():
        raise ValueError(f"the backend shm needs contiguous CPU tensors, not {list(x.shape)} on {x.device}")
    return x.data_ptr()


def _check_size(flat: Tensor, numel: int, piece: Tensor) -> None:
    if flat.numel() != numel or flat.dtype != piece.dtype:
        raise ValueError(
            f"{list(flat.shape)} of {flat.dtype} cannot hold one {list(piece.shape)} of {piece.dtype} per rank"
        )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


copyreg.pickle(SharedMemoryGroup, refuse_copy)
