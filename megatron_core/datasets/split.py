"""Shares of train, validation and test, and the sequences that each gets."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from megatron_core.errors import ConfigError

DEFAULT_SPLIT = "969,30,1"


def parse_split(split: str) -> tuple[float, float, float]:
    """The three fractions of a `--split`, their sum 1; shares left out at the end are 0."""
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--split {split} has a part that is no number; give three, such as {DEFAULT_SPLIT}"
        ) from error
    if len(shares) > 3:
        raise ConfigError(f"--split {split} has {len(shares)} parts; train, validation and test make three")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or sum(shares) == 0:
        raise ConfigError(f"--split {split} needs shares >= 0, at least one of them above, such as {DEFAULT_SPLIT}")
    shares += [0.0] * (3 - len(shares))
    train, valid, test = (share / sum(shares) for share in shares)
    return train, valid, test


def split_ranges(split: Sequence[float], num_sequences: int) -> tuple[range, ...]:
    """The sequence numbers of each part: contiguous, borders at round(cumulative fraction * sequences)."""
    borders = [round(fraction * num_sequences) for fraction in accumulate(split, initial=0.0)]
    return tuple(range(start, stop) for start, stop in pairwise(borders))
