"""Weights and moments that are stored in bfloat16: updated in float32, a chunk at a time, and rounded stochastically.

Rounded to nearest they would stand still: a change below 1/256 of a number is lost, every step anew, and with beta2 =
0.999 a second moment never decays. Rounded up with the probability of what is cut off, changes survive on average
(Gupta et al. 2015, section 3; Zamirai et al. 2020). Which way depends on (seed, step, tensor, element) alone, so that
copies round alike and no layout rounds otherwise.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_core.data_parallel import Bucket
from megatron_core.optimizer.algorithms import Part, Rates
from megatron_core.parallel.initialization import name_seed
from megatron_core.parallel.sharding import spec_of

CHUNK = 2**20
"""Elements of which float32 values exist at a time."""


def update_rounded(
    bucket: Bucket, at: slice, part: Part, rates: Rates, seed: int, update: Callable[[Part], None]
) -> None:
    """Let ``update`` change float32 values of ``part``, which is ``at`` of the bucket's shard, and round them."""
    wide = Part(part.grad, part.main.float(), part.copy, {name: held.float() for name, held in part.state.items()})
    update(wide)
    pairs = {"main": (part.main, wide.main)} | {name: (part.state[name], wide.state[name]) for name in part.state}
    for name, (stored, values) in pairs.items():
        if stored.dtype != values.dtype:
            _round_pieces(bucket, at, stored, values, name_seed(seed, f"{rates.step}:{name}"))


def _round_pieces(bucket: Bucket, at: slice, stored: Tensor, values: Tensor, seed: int) -> None:
    """Round parameter by parameter; what pads the shard is zero and stays so."""
    first = bucket.shard.start + at.start
    for name, parameter, start, stop, offset in bucket.pieces(slice(first, first + values.numel())):
        own = slice(offset, offset + stop - start)
        elements = spec_of(parameter).element_numbers(start, stop, values.device)
        stored[own] = round_stochastically(values[own], elements, name_seed(seed, name))


def round_stochastically(values: Tensor, elements: Tensor, seed: int) -> Tensor:
    """bfloat16 neighbours of float32 ``values``: the one away from zero with the probability of what is cut off.

    ``elements`` are int64 numbers, of which each draws by its own; numbers that are not finite stay what they are.
    """
    bits = values.view(torch.int32)
    rounded = bits.add(_noise(elements, seed)).bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _noise(elements: Tensor, seed: int) -> Tensor:
    """16 random bits of each number: the steps of a multiplicative hash, modulo 2^64 (Steele et al. 2014, splitmix)."""
    x = elements.mul(-7046029254386353131).add_(seed)
    for multiplier in (-4658895280553007687, -7723592293110705685):
        x.bitwise_xor_(x >> 31).mul_(multiplier)
    return (x >> 40).bitwise_and_(2**16 - 1).to(torch.int32)
