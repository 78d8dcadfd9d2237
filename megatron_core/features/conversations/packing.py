"""Packing of documents into sequences of a fixed length."""

from collections.abc import Iterable

import numpy as np

OPEN = 64
"""Sequences that may still receive documents; the oldest one is closed for a new one."""


def first_fit(documents: Iterable[tuple[int, int]], length: int) -> list[list[int]]:
    """Put each document (number, tokens), in order, into the first open sequence with room for it.

    A document longer than ``length`` fills a sequence. The result is a function of the arguments, ordered by the time
    at which sequences were opened. Source: Johnson et al. 1974 (first fit, at most 1.7 times the least number of
    sequences with all sequences open).
    """
    packs: list[list[int]] = []
    room = np.zeros(OPEN, dtype=np.int64)
    numbers = np.zeros(OPEN, dtype=np.int64)
    opened = 0
    for document, tokens in documents:
        tokens = min(tokens, length)
        fits = room[:opened] >= tokens
        if fits.any():
            position = int(fits.argmax())
        else:
            if opened == OPEN:  # close the oldest
                room[:-1], numbers[:-1] = room[1:].copy(), numbers[1:].copy()
                opened -= 1
            position = opened
            opened = opened + 1
            room[position], numbers[position] = length, len(packs)
            packs.append([])
        packs[numbers[position]].append(document)
        room[position] -= tokens
    return packs
