"""Initial weights as a function of (seed, parameter name, element), so that a rank draws only its own part."""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_core.parallel.boxes import Box
from megatron_core.parallel.sharding import spec_of

InitMethod = Callable[[Tensor], object]
CONSTANTS = (nn.init.zeros_, nn.init.ones_)
PER_COUNTER = 8
"""Elements of a Philox counter."""
CHUNK = 2**16
"""Elements drawn at a time, so that temporaries fit in a cache."""
ON_GPU = 2**20
"""Elements from which a tensor on a GPU is drawn there: about 2 ms, in which a core draws 2^15."""


class Normal:
    """N(0, std) per element; any part of a tensor can be drawn without the rest."""

    def __init__(self, std: float) -> None:
        self.std = std

    def __call__(self, tensor: Tensor) -> Tensor:
        """Draw from torch's generator, like ``torch.nn.init.normal_``."""
        return nn.init.normal_(tensor, std=self.std)

    def draw(self, seed: int, runs: list[tuple[int, int]]) -> np.ndarray:
        """Draw the elements ``start ... stop - 1`` of each run as one float32 array."""
        # One pass over all runs: short rows, as of a weight split along its columns, would otherwise cost a few numpy
        # calls each.
        words = list(_words(seed, runs))
        values = _normal_pairs(np.concatenate(words)).reshape(-1)
        firsts = np.cumsum([0, *(2 * len(run_words) for run_words in words[:-1])])
        drawn = [
            values[first + start % PER_COUNTER :][: stop - start]
            for first, (start, stop) in zip(firsts, runs, strict=True)
        ]
        return np.concatenate(drawn) * np.float32(self.std)


@torch.no_grad()
def initialise(parameter: nn.Parameter, init_method: InitMethod) -> None:
    """Draw the global tensor from torch's CPU generator and keep this rank's part.

    The draw is in float32 on the CPU for every dtype and device, so that ranks with the same seed hold parts of the
    same tensor.
    """
    spec = spec_of(parameter)
    # The random generator is consumed by the whole tensor in every layout, so that ranks with different parts stay in
    # step and the parts fit together.
    drawn = torch.empty(spec.global_shape, dtype=torch.float32)
    init_method(drawn)
    spec.localise(drawn.to(parameter.dtype), parameter.data)


@torch.no_grad()
def initialise_by_name(parameter: nn.Parameter, init_method: InitMethod, seed: int, name: str) -> None:
    """Fill ``parameter`` with values that depend only on the seed, the global name and each element's global index.

    ``Normal`` and the constants of torch.nn.init fill only this rank's part. Any other method may depend on the whole
    tensor, so the whole tensor is drawn, from a separate generator.
    """
    spec = spec_of(parameter)
    if not isinstance(init_method, Normal) and init_method not in CONSTANTS:
        # A user's method may draw any amount; fork_rng keeps it from changing the numbers that the program draws later.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(name_seed(seed, name))  # of the CPU only
            initialise(parameter, init_method)
        return
    # Padding has no box and must be zero: it takes part in matrix products.
    parameter.data.zero_()
    for piece in spec.parts:
        target = parameter.data[piece.local.index]
        if isinstance(init_method, Normal):
            _fill(target, piece.whole, spec.global_shape, init_method, name_seed(seed, name))
        else:
            init_method(target)


def draw_by_name(name: str, parameter: Any, seed: int) -> None:
    """Fill a parameter by its attribute ``init_method``, set by its layer."""
    initialise_by_name(parameter, parameter.init_method, seed, name)


def name_seed(seed: int, name: str) -> int:
    """Derive a 63-bit seed from a seed and a name."""
    # A cryptographic hash, because Python's ``hash`` of a text differs between processes. 63 bits, because generators
    # of torch and kernels take signed 64-bit seeds.
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def _fill(target: Tensor, box: Box, shape: tuple[int, ...], init_method: Normal, seed: int) -> None:
    """Fill ``target``, the part ``box`` of a tensor of ``shape``, one chunk at a time."""
    # A part of a dim before the last has gaps in memory; numpy's draws are contiguous.
    contiguous = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
    flat = contiguous.view(-1)
    offset = 0
    if flat.is_cuda and len(flat) >= ON_GPU and draws_alike(flat.device):
        draw_hook()(flat, box, shape, seed, init_method.std)
        if contiguous is not target:
            target.copy_(contiguous)
        return
    for runs in _chunks(box.flat_ranges(shape)):
        values = torch.from_numpy(init_method.draw(seed, runs))
        flat[offset : offset + len(values)] = values.to(flat)
        offset += len(values)
    if contiguous is not target:
        target.copy_(contiguous)


@cache
def draw_hook() -> Any:
    """The function of a feature that draws weights on their device; None: they are drawn on the CPU."""
    from megatron_core.feature import features, load_hook  # only on GPUs: a parallel layer alone needs no features

    hooks = (feature.draw_weights for feature in features() if feature.draw_weights is not None)
    return next(map(load_hook, hooks), None)


@cache
def draws_alike(device: torch.device) -> bool:
    """Whether ``draw_hook`` has the bits of ``Normal.draw`` on a device; warns if not."""
    fill = draw_hook()
    if fill is None:
        return False
    # A box from 0 whose rows are multiples of a counter, and one with odd bounds: both branches of ``fill_normal``.
    normal = Normal(0.02)
    shape = (257, 4096)
    seed = name_seed(0, "check")
    for box in (Box((0, 0), shape), Box((3, 5), (200, 1234))):
        drawn = torch.empty(box.numel, device=device)
        fill(drawn, box, shape, seed, normal.std)
        if not np.array_equal(drawn.cpu().numpy(), normal.draw(seed, list(box.flat_ranges(shape)))):
            warnings.warn(f"{device} rounds differently from a CPU: initial weights are drawn on the CPU", stacklevel=2)
            return False
    return True


def _chunks(runs: Iterator[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Group the runs into lists of at most ``CHUNK`` elements, splitting long runs."""
    chunk: list[tuple[int, int]] = []
    size = 0
    for start, stop in runs:
        while start < stop:
            end = min(stop, start + CHUNK - size)
            chunk.append((start, end))
            size = size + end - start
            start = end
            if size == CHUNK:
                yield chunk
                chunk = []
                size = 0
    if chunk:
        yield chunk


def _words(seed: int, runs: list[tuple[int, int]]) -> Iterator[np.ndarray]:
    """The 64-bit random words of each run, rounded outwards to whole counters.

    Philox 4x64-10 (Salmon et al. 2011): the words are a function of counter and key only.
    """
    generator = np.random.Philox(key=seed)
    state = generator.state
    for start, stop in runs:
        first = start // PER_COUNTER
        end = -(-stop // PER_COUNTER)
        # Setting the counter is a jump: elements far into a tensor cost nothing for those before them.
        state["state"]["counter"][0] = first
        generator.state = state
        yield generator.random_raw(4 * (end - first))


def _normal_pairs(words: np.ndarray) -> np.ndarray:
    """Two independent N(0, 1) samples per word, ``[n, 2]`` float32 (Box and Muller 1958).

    sqrt(-2 log u) times the cosine and the sine of 2 pi v, with u and v from the upper and the lower 32 bits. Logarithm
    and sine use only operations that IEEE 754 rounds alike on every machine (relative error 1e-6): libraries differ in
    the last bit, but replicas of a weight on different processors must not.
    """
    upper = (words >> np.uint64(32)).astype(np.float32)
    lower = words.astype(np.uint32)
    u = (upper + np.float32(0.5)) * np.float32(2.0**-32)
    mantissa, exponent = np.frexp(u)
    s = (mantissa - 1) / (mantissa + 1)  # log m = 2 artanh((m - 1) / (m + 1)), here with |s| <= 1/3
    log = exponent.astype(np.float32) * np.float32(0.6931471805599453) + 2 * s * _polynomial(
        s * s, (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3, 1)
    )
    radius = np.sqrt(np.maximum(-2 * log, np.float32(0)))
    quarter = np.uint32(2**30)
    return np.stack([radius * _cosine(lower), radius * _cosine(lower - quarter)], axis=1)


def _cosine(turns: np.ndarray) -> np.ndarray:
    """cos(2 pi turns / 2^32), from the sine series over a quarter turn on either side of zero."""
    distance = np.abs(turns.astype(np.float32) * np.float32(2.0**-32) - np.float32(0.5)) - np.float32(0.25)
    t = distance * np.float32(2 * np.pi)
    return t * _polynomial(t * t, (-1 / 39916800, 1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1))


def _polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """Evaluate a polynomial by Horner's rule, highest power first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += np.float32(coefficient)
    return result
