"""The results of each collective in plain arithmetic, and its call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel import collectives

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def values(seed: int, count: int, dtype: torch.dtype) -> Tensor:
    """Random values; sums of the integers wrap around."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        high = min(limits.max, 2**62)
        return torch.randint(max(limits.min, -(2**62)), high, (count,), generator=generator, dtype=dtype)
    return torch.randn(count, generator=generator, dtype=torch.float32).to(dtype)


def reduced(xs: Sequence[Tensor], reduction: str) -> Tensor:
    """Sequential sums in rank order, half precision in float32 with one rounding."""
    wide = torch.float32 if xs[0].dtype in (torch.bfloat16, torch.float16) else xs[0].dtype
    total = xs[0].to(wide)
    for x in xs[1:]:
        combine = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[reduction]
        total = combine(total, x.to(wide))
    return total.to(xs[0].dtype)


def splits(seed: int, rows: int, size: int) -> list[list[int]]:
    """``splits[i][j]`` rows go from i to j; some are 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, rows + 1, (size, size), generator=generator).tolist()


Started = tuple[Tensor, Tensor, Callable[[], object]]
"""The tensors to fill, their expected values, and the wait."""


def start(kind: str, seed: int, count: int, dtype: torch.dtype, group: dist.ProcessGroup, *, wait: bool) -> Started:
    """Call a collective, with ``wait`` synchronously; every rank knows the inputs of all others."""
    size, me = group.size(), group.rank()
    reduction = list(REDUCTIONS)[seed % 3]
    settings = {"group": group, "async_op": not wait}
    if kind == "all_to_all ragged":
        return _ragged(seed, count, dtype, group, settings)
    parts = size if kind in ("reduce_scatter", "all_to_all") else 1
    xs = [values(97 * seed + rank, count * parts, dtype) for rank in range(size)]
    x = xs[me].clone()
    if kind == "all_reduce":
        handle = dist.all_reduce(x, op=REDUCTIONS[reduction], **settings)
        return x, reduced(xs, reduction), _wait(handle)
    if kind == "broadcast":
        source = seed % size
        handle = dist.broadcast(x, dist.get_global_rank(group, source), **settings)
        return x, xs[source], _wait(handle)
    if kind == "all_gather":
        out = x.new_empty(count * size)
        handle = collectives._all_gather(out, x, **settings)
        x.zero_()  # its data was copied in the call
        return out, torch.cat(xs), _wait(handle)
    out = x.new_empty(count)
    if kind == "reduce_scatter":
        handle = collectives._reduce_scatter(out, x, op=REDUCTIONS[reduction], **settings)
        return out, reduced(xs, reduction)[me * count :][:count], _wait(handle)
    assert kind == "all_to_all"
    out = x.new_empty(count * size)
    handle = dist.all_to_all_single(out, x, **settings)
    x.zero_()
    return out, torch.cat([other[me * count :][:count] for other in xs]), _wait(handle)


def _ragged(seed: int, count: int, dtype: torch.dtype, group: dist.ProcessGroup, settings: dict) -> Started:
    size, me = group.size(), group.rank()
    table = splits(seed, max(1, count // size), size)
    xs = [values(97 * seed + rank, 3 * sum(table[rank]), dtype).view(-1, 3) for rank in range(size)]
    received = [row[me] for row in table]
    out = xs[me].new_empty(sum(received), 3)
    handle = dist.all_to_all_single(out, xs[me], received, table[me], **settings)
    expected = torch.cat([xs[rank].split(table[rank])[me] for rank in range(size)])
    return out, expected, _wait(handle)


def _wait(handle: dist.Work | None) -> Callable[[], object]:
    return handle.wait if handle is not None else lambda: None


KINDS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "all_to_all ragged")


def same(found: Tensor, expected: Tensor) -> bool:
    """Bitwise equal, including NaN."""
    return torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8))
