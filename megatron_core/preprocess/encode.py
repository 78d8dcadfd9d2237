"""Texts to token ids, lengths of sequences, and numbers of sequences in documents."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain

import numpy as np

from megatron_core.errors import ConfigError, DataError, MegatronError
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
            "other; correct them, or use --tokenization-backend tokenizers"
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
    """The ids with an eod inserted at each of the positions `ends` [D], the last of which is their end."""
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
    """The tokenizer's error for each text that it cannot tokenize, by the number of the text."""
    found = {}
    for number, text in enumerate(texts):
        try:
            backend.encode([text])
        except MegatronError as error:
            found[number] = f"cannot be tokenized: {error}"
    return found


def sentence_splitter(keep_newlines: bool) -> Splitter:
    """A function from a text to its sentences, by Punkt's rules without trained abbreviations (Kiss and Strunk, 2006).

    keep_newlines: the white space that follows a sentence stays with it; otherwise it is left out.
    ConfigError: the optional package nltk is not installed.
    """
    if find_spec("nltk") is None:
        raise ConfigError("--split-sentences needs the package nltk, which is not installed; pip install nltk")
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    punkt = PunktSentenceTokenizer()
    if not keep_newlines:
        return punkt.tokenize

    def with_spaces(text: str) -> list[str]:
        starts = [start for start, _ in punkt.span_tokenize(text)]
        if not starts:
            return [text] if text else []
        begins = [0, *starts[1:]]
        return [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]

    return with_spaces
