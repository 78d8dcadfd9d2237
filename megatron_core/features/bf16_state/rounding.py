"""Update weights and moments stored in bfloat16: compute chunks in float32 and round them stochastically.

Rounding to nearest would lose every change below 1/256 of a value, in every step; with beta2 = 0.999 a second moment
would never decay. Stochastic rounding rounds up with a probability equal to the discarded fraction, so the expected
value is exact (Gupta et al. 2015, section 3; Zamirai et al. 2020). The direction depends only on (seed, step, tensor,
element), so it is the same for all copies and in all layouts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_core.data_parallel import Bucket
from megatron_core.optimizer.rule import Rates, ShardSlice
from megatron_core.parallel.initialization import name_seed
from megatron_core.parallel.sharding import ShardSpec, spec_of


def update_rounded(
    bucket: Bucket, span: slice, piece: ShardSlice, rates: Rates, seed: int, update: Callable[[ShardSlice], None]
) -> None:
    """Apply ``update`` to float32 values of ``piece``, the slice ``span`` of the bucket's shard, and round them."""
    wide = ShardSlice(
        piece.grad, piece.main.float(), piece.copy, {name: tensor.float() for name, tensor in piece.state.items()}
    )
    update(wide)
    pairs = {"main": (piece.main, wide.main)} | {name: (piece.state[name], wide.state[name]) for name in piece.state}
    for name, (stored, values) in pairs.items():
        if stored.dtype != values.dtype:
            _round_pieces(bucket, span, stored, values, name_seed(seed, f"{rates.step}:{name}"))


def _round_pieces(bucket: Bucket, span: slice, stored: Tensor, values: Tensor, seed: int) -> None:
    """Round each parameter; the padding of the shard remains zero."""
    first = bucket.shard.start + span.start
    for name, parameter, start, stop, offset in bucket.pieces(slice(first, first + values.numel())):
        elements_of_parameter = slice(offset, offset + stop - start)
        # Numbers in the whole tensor: copies and other layouts then round in the same direction.
        elements = element_numbers(spec_of(parameter), start, stop, values.device)
        stored[elements_of_parameter] = round_stochastically(
            values[elements_of_parameter], elements, name_seed(seed, name)
        )


def element_numbers(spec: ShardSpec, start: int, stop: int, device: torch.device) -> Tensor:
    """Global flat indices of the elements ``start ... stop - 1`` of a rank's flattened tensor, int64; undefined for
    padding."""
    # Digits of the local flat index, from the last dim on; each becomes a global index by a table of its dim.
    left = torch.arange(start, stop, device=device)
    numbers = torch.zeros_like(left)
    stride = 1
    for dim in reversed(range(len(spec.global_shape))):
        indices = torch.zeros(spec.local_shape[dim], dtype=torch.int64)
        for run in spec.runs[dim]:
            indices[slice(*run.local)] = torch.arange(*run.whole)
        numbers += indices.to(device)[left % len(indices)] * stride
        left = left // len(indices)
        stride = stride * spec.global_shape[dim]
    return numbers


def round_stochastically(values: Tensor, elements: Tensor, seed: int) -> Tensor:
    """Round float32 ``values`` to bfloat16, away from zero with a probability equal to the discarded fraction.

    ``elements``: int64 element numbers, which determine the random bits. Values that are not finite are unchanged.
    """
    # bfloat16 is the upper half of a float32: adding 16 random bits to the lower half carries with the right
    # probability.
    bits = values.view(torch.int32)
    rounded = bits.add(_noise(elements, seed)).bitwise_and_(-(2**16)).view(torch.float32)
    # The carry of an infinity would be NaN.
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _noise(elements: Tensor, seed: int) -> Tensor:
    """Return 16 random bits per element: a multiplicative hash modulo 2^64 (Steele et al. 2014, splitmix)."""
    x = elements.mul(-7046029254386353131).add_(seed)
    for multiplier in (-4658895280553007687, -7723592293110705685):
        x.bitwise_xor_(x >> 31).mul_(multiplier)
    return (x >> 40).bitwise_and_(2**16 - 1).to(torch.int32)
