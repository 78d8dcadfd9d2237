"""Hashes of global tensors, computed from any parts of them without gathering.

A tensor is read as a matrix ``x[r, c]`` of signed 32-bit words: c runs over the last dimension (two words for a 64-bit
element; narrower elements are one word each), r over all others. Its sum is

    h = sum over r, c of  x[r, c] * a(r) * b(c)   modulo 2^64

with fixed pseudo-random odd numbers a and b. ``finished`` joins the sum with shape and dtype.
"""

# A sum of terms, so that the sums of disjoint parts add up to that of the tensor, in any order and for any layout.
# Two tensors that differ in one bit always have different sums; two that differ otherwise have equal sums with a
# probability of about 2^-30, because the differences of words are below 2^32. NaN is a bit pattern like any other, and
# 0 and -0 differ. The hash detects accidents; it is not meant against forgery.

import ctypes
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from megatron_core.parallel.boxes import Box

CHUNK = 2**18
"""Words converted to 64 bits at a time: 2 MiB. Of 2^14 to 2^22, 2^16 to 2^19 are equally fast on a CPU."""
_TABLE = 2**16
"""Factors that are kept; those of larger indices are computed on each use."""
_ROW = 4096
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# digits of pi
_ROW_SEED = 0x243F6A8885A308D3
_COLUMN_SEED = 0x13198A2E03707344
_GOLDEN = -0x61C8864680B583EB
_FIRST = -0x40A7B892E31B1A47
_SECOND = -0x6B2FB644ECCEEE15


def box_sum(values: Tensor, box: Box, shape: tuple[int, ...]) -> Tensor:
    """The sum of one ``box`` of a tensor of ``shape``, whose elements are ``values`` ``[*box.shape]``: an int64 scalar.

    Sums of disjoint boxes, added modulo 2^64, give the sum of all of them.
    """
    # Bits and not values, so that NaN has one hash and no rounding can take part.
    words = values.detach().reshape(-1, box.shape[-1] if shape else 1).contiguous()
    per_element = max(words.element_size() // 4, 1)
    words = words.view(_WORDS[words.element_size()])
    first = box.start[-1] * per_element if shape else 0
    columns = _factors(first, first + words.shape[1], _COLUMN_SEED, words.device)
    rows = _row_factors(Box(box.start[:-1], box.stop[:-1]), shape[:-1], words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    # In chunks: int64 copies of all words would take 2 to 8 times the memory of the tensor.
    height = max(CHUNK // max(words.shape[1], 1), 1)
    for chunk, factors in zip(words.split(height), rows.split(height), strict=True):
        total += _rows_sum(chunk, columns).mul_(factors).sum()
    return total


def _rows_sum(words: Tensor, columns: Tensor) -> Tensor:
    """The sum of each row's words times ``columns``, at most ``CHUNK`` columns at a time."""
    if words.shape[1] <= CHUNK:
        return words.to(torch.int64).mul_(columns).sum(1)
    chunks = zip(words.split(CHUNK, 1), columns.split(CHUNK), strict=True)
    return torch.stack([chunk.to(torch.int64).mul_(factors).sum(1) for chunk, factors in chunks]).sum(0)


def _row_factors(box: Box, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Factors of the flat indices that ``box`` covers in a tensor of ``shape``."""
    ranges = list(box.flat_ranges(shape)) if shape else [(0, 1)]
    if len(ranges) == 1:
        return _factors(*ranges[0], _ROW_SEED, device)
    return torch.cat([_factors(*span, _ROW_SEED, device) for span in ranges])


def _factors(start: int, stop: int, seed: int, device: torch.device) -> Tensor:
    """The odd factors of the indices ``start ... stop - 1``."""
    if stop <= _TABLE:
        return _table(seed, device)[start:stop]
    return _mixed(torch.arange(start, stop, device=device), seed)


@cache
def _table(seed: int, device: torch.device) -> Tensor:
    return _mixed(torch.arange(_TABLE, device=device), seed)


def _mixed(index: Tensor, seed: int) -> Tensor:
    """The finalizer of splitmix64 (Steele, Lea and Flood 2014), made odd; int64 wraps modulo 2^64."""
    x = (index * _GOLDEN).add_(seed)
    # Neighbouring indices must not have similar factors: exchanged rows would otherwise have similar sums.
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = x.bitwise_xor_(_shifted(x, shift)).mul_(factor)
    return x.bitwise_xor_(_shifted(x, 31)).bitwise_or_(1)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """The unsigned right shift, which torch lacks for int64."""
    return (x >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def finished(total: int, shape: Iterable[int], dtype: torch.dtype) -> str:
    """The hash of a tensor from its sum ``total``: 16 hexadecimal digits."""
    text = f"{str(dtype).removeprefix('torch.')} {list(shape)} {total % 2**64:016x}"
    return xxh3_64_hexdigest(text.encode())


def tensor_hash(values: Tensor) -> str:
    """The hash of a whole tensor."""
    shape = tuple(values.shape)
    return finished(int(box_sum(values, Box((0,) * len(shape), shape), shape)), shape, values.dtype)


def combined(hashes: Iterable[tuple[str, str]]) -> str:
    """One hash of the pairs (name, hash of the tensor), independent of their order."""
    lines = sorted(f"{name} {value}" for name, value in hashes)
    return xxh3_64_hexdigest("\n".join(lines).encode())


def bit_hash(x: Tensor) -> Tensor:
    """A 64-bit hash of the bits of a contiguous tensor, as an int64 scalar on its device."""
    data = x.detach().reshape(-1).view(torch.uint8)
    if data.device.type == "cpu":
        # data.numpy() would make the storage fixed in size, and ZeRO 3 frees storages by resizing them.
        size = data.numel()
        digest = xxh3_64_intdigest((ctypes.c_char * size).from_address(data.data_ptr()) if size else b"")
        return torch.tensor(digest - (digest >> 63 << 64), dtype=torch.int64)
    return hash_on_device(data)


def hash_on_device(data: Tensor) -> Tensor:
    """The hash of bytes ``[n]`` without a copy to the host; its values differ from those on a CPU."""
    # Rows of 4,096 bytes, so that the factors of columns come from the cached table.
    full_rows = data.numel() // _ROW * _ROW
    # The length takes part: zeros at the end would not change the sum.
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for chunk, width in ((data[:full_rows], _ROW), (data[full_rows:], data.numel() - full_rows)):
        if width:
            shape = (chunk.numel() // width, width)
            total = total * 3 + box_sum(chunk.view(shape), Box((0, 0), shape), shape)
    return total
