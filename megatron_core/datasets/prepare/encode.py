"""From the texts of a batch to token bytes, sequence lengths and sequences of each document."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_core.errors import DataError, MegatronError
from megatron_core.tokenizers.fast import Backend

# Up to here pieces are copied one by one, in a third of the time of np.insert, which goes over all ids several times.
FEW = 64

Splitter = Callable[[str], list[str]]


@dataclass(frozen=True)
class Layout:
    """How tokens are stored.

    dtype: of a token. vocab_size: one more than the largest id. eod: the id after each document, None for none.
    """

    dtype: str
    vocab_size: int
    eod: int | None


@dataclass(frozen=True)
class Encoded:
    """Documents of one key: tokens back to back, lengths of sequence [S], sequences in each document [D]."""

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray


def encode(texts: Sequence[str], backend: Backend, layout: Layout, splitter: Splitter | None = None) -> Encoded:
    """Tokenize documents; an empty one has no sequence, and no end-of-document id, as Megatron writes it."""
    sentences = [splitter(text) for text in texts] if splitter else None
    ids, lengths = backend.encode(list(chain.from_iterable(sentences)) if sentences is not None else texts)
    if len(ids) and ids.max() >= layout.vocab_size:
        raise DataError(
            f"the tokenizer gave the id {ids.max()} and has {layout.vocab_size} tokens: its files contradict each "
            "other; mend them, or use --tokenization-backend tokenizers"
        )
    filled = lengths > 0
    if sentences is None:
        counts = filled.astype(np.int32)
    else:
        owner = np.repeat(np.arange(len(texts)), [len(document) for document in sentences])
        counts = np.bincount(owner[filled], minlength=len(texts)).astype(np.int32)
    lengths = lengths[filled]
    if layout.eod is not None:
        last = np.cumsum(counts)[counts > 0] - 1
        ids = with_ends(ids, np.cumsum(lengths)[last], layout.eod, layout.dtype)
        lengths[last] += 1
    return Encoded(ids.astype(layout.dtype, copy=False), lengths.astype(np.int32), counts)


def with_ends(ids: np.ndarray, ends: np.ndarray, eod: int, dtype: str) -> np.ndarray:
    """The ids, cut at the places `ends` [D], the last of which is their end, with an eod behind each piece."""
    if len(ends) > FEW:
        return np.insert(ids.astype(dtype), ends, eod)
    found = np.empty(len(ids) + len(ends), dtype)
    start = 0
    for number, end in enumerate(ends.tolist()):
        found[start + number : end + number] = ids[start:end]
        found[end + number] = eod
        start = end
    return found


def refused(texts: Sequence[str], backend: Backend) -> dict[int, str]:
    """What the tokenizer says of each text that it refuses, by the text's number."""
    found = {}
    for number, text in enumerate(texts):
        try:
            backend.encode([text])
        except MegatronError as error:
            found[number] = f"cannot be tokenized: {error}"
    return found
