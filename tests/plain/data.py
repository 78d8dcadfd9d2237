"""Samples of token files, from the definition of Megatron-LM's files and of the keyed order."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

Piece = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens of a sample, and their labels: the next tokens."""
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def read_sequences(prefix: str) -> list[list[int]]:
    """The sequences of PREFIX.bin; PREFIX.idx has a magic number, version, dtype, counts, lengths and offsets."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00" and struct.unpack_from("<Q", index, 9) == (1,)
    dtype = DTYPES[index[17]]
    (count,) = struct.unpack_from("<Q", index, 18)
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    offsets = struct.unpack_from(f"<{count}q", index, 34 + 4 * count)
    data = Path(f"{prefix}.bin").read_bytes()
    return [
        np.frombuffer(data, dtype, length, offset).tolist() for length, offset in zip(lengths, offsets, strict=True)
    ]


def share_of(sequences: list[list[int]], split: Sequence[float], number: int) -> list[list[int]]:
    """The sequences of part ``number`` of a split: borders are at rounded shares of the number of sequences."""
    total = sum(split)
    first = round(sum(split[:number]) / total * len(sequences))
    return sequences[first : round(sum(split[: number + 1]) / total * len(sequences))]


def pieces(sequences: list[list[int]], length: int) -> list[Piece]:
    """All samples of one epoch: the text of all sequences, cut every ``length`` tokens."""
    text = [token for sequence in sequences for token in sequence]
    starts = range(0, len(text) - length, length)
    return [(tuple(text[i : i + length]), tuple(text[i + 1 : i + length + 1])) for i in starts]


def epochs_problem(samples: list[Piece], of_epoch: list[Piece]) -> str:
    """Why ``samples`` are not epochs, each with all pieces once and in an order of its own; "" if they are."""
    size = len(of_epoch)
    parts = [samples[i : i + size] for i in range(0, len(samples), size)]
    for number, part in enumerate(parts):
        extra = Counter(part) - Counter(of_epoch)
        if extra or (len(part) == size and Counter(part) != Counter(of_epoch)):
            return f"epoch {number} has other pieces"
    whole = [part for part in parts if len(part) == size]
    if size > 4 and (of_epoch in whole or len({tuple(part) for part in whole}) < len(whole)):
        return "two epochs have one order, or that of the file"
    return ""


def blend_problem(sources: list[int], weights: Sequence[float]) -> str:
    """Why a mixture is not even: after i samples data set d has i w_d / sum(w) of them, up to 1 for each data set."""
    counts = [0] * len(weights)
    for i, source in enumerate(sources, start=1):
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            if abs(count - i * weight / sum(weights)) > len(weights):
                return f"after {i} samples the counts are {counts}"
    return ""
