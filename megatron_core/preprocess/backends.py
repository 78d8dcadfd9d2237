"""Backends that tokenize many texts at once: the tokenizer itself, or the optional, faster package `gigatoken`.

A backend returns arrays, because a Python integer for each token would be slow. `gigatoken` supports only some
tokenizers, and is used only if it gives the same ids as the tokenizer on sample texts: see `disagreement`.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any, Protocol

import numpy as np

from megatron_core.errors import ConfigError
from megatron_core.tokenizers.base import Tokenizer, dropped_bytes
from megatron_core.vocabularies.byte_symbols import add_missing_bytes
from megatron_core.vocabularies.hugging_face import END_OF_DOCUMENT, LibraryTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer

BACKENDS = ("auto", "tokenizers", "gigatoken")
"""The legal values of `--tokenization-backend`."""

REMEDY = "use --tokenization-backend tokenizers"

# Texts to encode one by one, at 4 microseconds each, before using the list method, which first imports the package
# awkward (0.2 s in each process).
SINGLY = 20_000

# Texts for which backends are likely to differ.
ODD_TEXTS = (
    "", " ", "  ", " \n\n \t\t  \r\n x", "a" * 300, "0123456789 3.14 1e-5", "it's we'll I'M", "\x00\x01\x7f",
    "Gr\u00fc\u00dfe na\u00efve \u00c5\u0301 e\u0301", "\u4e16\u754c\u3002", "\u0645\u0631\u062d\u0628\u0627",
    "\U0001f642\u200d\U0001f680\ufe0f", "\u00a0\u2003\u3000x\u00a0", "\u0130\ufb01\u212b\u1e9e", "\ufeffx\ufffd",
    "</s><s><pad><unk>[CLS][MASK]", "_\u2581_ \u2581",
)  # fmt: skip


class Backend(Protocol):
    """Tokenizes texts. name: its value of `--tokenization-backend`."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts back to back, and the number of ids of each text [texts]."""
        ...


class TokenizerBackend:
    """The tokenizer itself, in batches."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts back to back, and the number of ids of each text [texts]."""
        ids = self._tokenizer.tokenize_batch(texts)
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum())), lengths


class GigatokenBackend:
    """`gigatoken` in the calling thread.

    gigatoken requires a token for every byte. Other vocabularies are extended by tokens for the missing bytes, with ids
    >= `first_added`. A text with one of these tokens is encoded again by the original tokenizer, `exact`, which drops
    the byte, so that its neighbours may merge.
    """

    name = "gigatoken"

    def __init__(self, tokenizer: Any, exact: Tokenizer | None = None, first_added: int = 0) -> None:
        self._tokenizer = tokenizer
        self._exact = exact
        self._first_added = first_added
        self._singly = SINGLY

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts back to back, and the number of ids of each text [texts]."""
        ids, lengths = self._encode(texts)
        if self._exact is None or not len(ids) or ids.max() < self._first_added:
            return ids, lengths
        affected = np.unique(np.repeat(np.arange(len(texts)), lengths)[ids >= self._first_added]).tolist()
        ids_by_text = np.split(ids, np.cumsum(lengths)[:-1])
        for number, right in zip(affected, self._exact.tokenize_batch([texts[n] for n in affected]), strict=True):
            ids_by_text[number] = np.array(right, ids.dtype)
        return np.concatenate(ids_by_text), np.fromiter(map(len, ids_by_text), dtype=np.int64, count=len(ids_by_text))

    def _encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        self._singly -= len(texts)
        if self._singly < 0:
            layout = self._tokenizer.encode_batch(list(texts), parallel=False).layout
            offsets = np.asarray(layout.offsets.data)
            return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)
        ids = [self._tokenizer.encode(text) for text in texts]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.concatenate(ids) if ids else np.empty(0, np.uint32), lengths


def load_backend(tokenizer: Tokenizer, backend: str = "auto") -> tuple[Backend, str]:
    """Return the backend, and for `auto` the reason if it is not gigatoken ("" if gigatoken is not installed).

    ConfigError: `backend` is gigatoken, and it is not installed or does not support the tokenizer.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--tokenization-backend {backend} is not supported; supported: {', '.join(BACKENDS)}")
    reason = ""
    if backend != "tokenizers":
        try:
            return load_gigatoken(tokenizer), ""
        except ConfigError as error:
            if backend == "gigatoken":
                raise
            reason = str(error).removesuffix(f"; {REMEDY}") if find_spec("gigatoken") else ""
    return TokenizerBackend(tokenizer), reason


def load_gigatoken(tokenizer: Tokenizer) -> GigatokenBackend:
    """Build gigatoken's backend; ConfigError if it is not installed or does not support the tokenizer."""
    if find_spec("gigatoken") is None:
        raise ConfigError("--tokenization-backend gigatoken: the package is not installed; pip install gigatoken")
    import gigatoken

    try:
        if isinstance(tokenizer, LibraryTokenizer):
            return _from_json(tokenizer)
        if isinstance(tokenizer, SentencePieceTokenizer) and not tokenizer.add_bos:
            return GigatokenBackend(gigatoken.Tokenizer.from_sentencepiece(str(tokenizer.files()[0])))
    except Exception as error:  # the package raises many kinds
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"gigatoken does not support this tokenizer ({reason}); {REMEDY}") from error
    settings = " that puts a token before every text" if getattr(tokenizer, "add_bos", False) else ""
    raise ConfigError(f"gigatoken does not support a {type(tokenizer).__name__}{settings}; {REMEDY}")


def _from_json(tokenizer: LibraryTokenizer) -> GigatokenBackend:
    """Build gigatoken's backend from a tokenizer.json, with added tokens for missing bytes."""
    import gigatoken

    text = tokenizer.to_json()
    try:
        return GigatokenBackend(gigatoken.Tokenizer.from_json(text))
    except Exception:  # the package raises many kinds
        if not dropped_bytes(tokenizer):
            raise
    completed = json.loads(text)
    first = add_missing_bytes(completed)
    return GigatokenBackend(gigatoken.Tokenizer.from_json(json.dumps(completed)), tokenizer, first)


def odd_texts(tokenizer: Tokenizer) -> list[str]:
    """Texts on which backends are likely to differ: spaces, symbols, and the tokenizer's added tokens as text."""
    added = [*END_OF_DOCUMENT, *(tokenizer.added_tokens() if isinstance(tokenizer, LibraryTokenizer) else ())]
    # Large vocabularies have thousands of reserved tokens: take every second one, at most 1,000.
    written = added if len(added) < 100 else added[::2][:1000]
    return [*ODD_TEXTS, *(form for token in written for form in (token, f"a{token} b"))]


def disagreement(expected: Mapping[str, list[int]], ids: np.ndarray, lengths: np.ndarray) -> str | None:
    """The beginning of the first text whose ids differ from the expected ids, quoted; None if all agree."""
    start = 0
    for (text, right), length in zip(expected.items(), lengths.tolist(), strict=True):
        if right != ids[start : start + length].tolist():
            return repr(text[:60])
        start += length
    return None
