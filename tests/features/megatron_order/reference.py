"""Megatron-LM's algorithms for the data order, written from their description without regard to speed."""

from collections.abc import Sequence

import numpy as np


def sample_index(
    sizes: Sequence[int], documents: Sequence[int], length: int, extra: int, drop_last: bool
) -> list[tuple[int, int]]:
    """Walk through the documents until a sample has L + x tokens; then step back by x."""
    tokens = sum(int(sizes[d]) for d in documents)
    num_samples = max(0, tokens - extra) // length
    if not drop_last and max(0, tokens - extra) % length:
        num_samples += 1
    rows = [(0, 0)]
    entry, offset = 0, 0
    while len(rows) <= num_samples:
        missing = length + extra
        while missing:
            here = int(sizes[documents[entry]]) - offset
            if here >= missing:
                offset += missing - extra
                missing = 0
            elif entry == len(documents) - 1:
                assert len(rows) == num_samples
                offset = int(sizes[documents[entry]]) - extra
                break
            else:
                missing -= here
                entry += 1
                offset = 0
        rows.append((entry, offset))
    return rows


def num_epochs(tokens: int, length: int, num_samples: int | None, extra: int) -> int:
    """Add epochs until there are enough tokens."""
    epochs = 1
    while num_samples is not None and epochs * tokens < num_samples * length + extra:
        epochs += 1
    return epochs


def indices(
    sizes: Sequence[int],
    documents: Sequence[int],
    length: int,
    num_samples: int | None,
    seed: int,
    extra: int = 1,
    drop_last: bool = True,
) -> tuple[list[int], list[tuple[int, int]], list[int], int, bool]:
    """Document, sample and shuffle indices, the epochs, and whether the last one is shuffled separately."""
    tokens = sum(int(sizes[d]) for d in documents)
    epochs = num_epochs(tokens, length, num_samples, extra)
    before, separate = 0, False
    if epochs > 1:
        before = ((epochs - 1) * tokens - extra) // length
        in_epoch = (tokens - extra) // length
        assert 0 <= num_samples - before <= in_epoch + 1
        separate = num_samples - before < int(0.80 * in_epoch)
    state = np.random.RandomState(seed)

    def shuffled(values: list[int], dtype: type) -> list[int]:
        array = np.array(values, dtype=dtype)
        state.shuffle(array)
        return array.tolist()

    if separate:
        order = shuffled(list(documents) * (epochs - 1), np.int32)
        order += shuffled(list(documents), np.int32)
    else:
        order = shuffled(list(documents) * epochs, np.int32)
    rows = sample_index(sizes, order, length, extra, drop_last)
    total = len(rows) - 1
    if separate:
        shuffle = shuffled(list(range(before)), np.uint32)
        if before != total:
            shuffle += shuffled(list(range(before, total)), np.uint32)
    else:
        shuffle = shuffled(list(range(total)), np.uint32)
    return order, rows, shuffle, epochs, separate


def blend(weights: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """The data set that lags most behind its share, the first on a tie; Python's floats are doubles."""
    taken = [0] * len(weights)
    chosen, samples = [], []
    for i in range(size):
        step = max(float(i), 1.0)
        errors = [weight * step - float(count) for weight, count in zip(weights, taken, strict=True)]
        best = errors.index(max(errors))
        chosen.append(best)
        samples.append(taken[best])
        taken[best] += 1
    return chosen, samples


def exhaustive_blend(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The same with sizes as weights, until every data set is exhausted."""
    weights = [size / float(sum(sizes)) for size in sizes]
    taken = [0] * len(sizes)
    chosen, samples = [], []
    left = {number for number, size in enumerate(sizes) if size}
    while left:
        step = max(float(len(chosen)), 1.0)
        best = max(sorted(left), key=lambda d: weights[d] * step - float(taken[d]))
        chosen.append(best)
        samples.append(taken[best])
        taken[best] += 1
        if taken[best] == sizes[best]:
            left.remove(best)
    return chosen, samples
