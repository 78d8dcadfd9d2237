"""The interface of all tokenizers, their base class, and functions on tokenizers."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to token ids and back; a fingerprint identifies the vocabulary.

    vocab_size: one more than the largest id that `tokenize` can return.
    eod, bos, eos, pad: the ids for end of document, beginning of sequence, end of sequence and padding; None if the
    vocabulary has no such token.

    """

    # Several of these may be the same id: most vocabularies end a document with `eos`, and many published ones also pad
    # with it. An `eod` in the text is a token that the model has to learn to predict. Therefore no mask depends on
    # `pad`; only `--eod-mask-loss` masks the loss where the input token is `eod`.

    vocab_size: int
    eod: int | None
    bos: int | None
    eos: int | None
    pad: int | None

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text, without an end-of-document id."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, equal to `tokenize` of each, but faster if the library has a batch method."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the token ids."""
        ...

    def fingerprint(self) -> str:
        """The SHA-256, as hexadecimal digits, of everything that determines the ids of a text; computed once."""
        ...

    def files(self) -> list[Path]:
        """The files that the tokenizer was loaded from; checkpoints keep copies of them."""
        ...


Offsets = list[tuple[int, int]]
"""The characters [begin, end) of the text that each token comes from."""


class BaseTokenizer:
    """Base class with defaults for a tokenizer without special ids and files.

    special_as_text: special tokens that are encoded as ordinary text where they occur in a text.
    declared_ends: ids that end a generated text, from the settings of generation of the model.
    """

    vocab_size: int
    eod: int | None = None
    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    special_as_text: Sequence[str] = ()
    declared_ends: Sequence[int] = ()

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text."""
        raise NotImplementedError

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, in one thread: preprocessing uses several processes instead."""
        return [self.tokenize(text) for text in texts]

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """The token ids of one text, equal to `tokenize`, and the characters of each."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """The digest of ``_identity``, computed once."""
        return self._fingerprint

    def files(self) -> list[Path]:
        """The files that the tokenizer was loaded from; by default none."""
        return []

    def _identity(self) -> Sequence[bytes]:
        """Everything that determines the ids of a text."""
        raise NotImplementedError

    @cached_property
    def _fingerprint(self) -> str:
        return digest(*self._identity())


def end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """All ids that end a generated text: end of document, end of sequence and, in chat vocabularies, end of turn."""
    ends = (tokenizer.eod, tokenizer.eos, *getattr(tokenizer, "turn_ends", ()))
    return frozenset(end for end in ends if end is not None)


def dropped_bytes(tokenizer: Tokenizer) -> bytes:
    """The byte values of UTF-8 text without a token; the tokenizer drops them."""
    return getattr(tokenizer, "missing_bytes", b"")


def digest(*fields: bytes) -> str:
    """The SHA-256, as hexadecimal digits, of the parts, each preceded by its length."""
    total = hashlib.sha256()
    for data in fields:
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return total.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The JSON text of a value with sorted keys: the same for any spacing and order of keys in the file."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
