"""The interface of all tokenizers, and functions that every one of them uses."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import orjson


@runtime_checkable
class Tokenizer(Protocol):
    """Converts text to token ids and back; a fingerprint identifies the vocabulary.

    vocab_size: one more than the largest id that `tokenize` can return.
    eod, bos, eos, pad: the ids for end of document, beginning of sequence, end of sequence and padding; None if the
    vocabulary has no such token.

    Several of these may be the same id: most vocabularies end a document with `eos`, and many published ones also pad
    with it. An `eod` in the text is a real token that the model has to learn to predict. Therefore use `padding_id`,
    never `pad`, to decide which tokens to mask as padding: it is None if `pad` has another meaning too. Only
    `--eod-mask-loss` masks the loss where the input token is `eod`.
    """

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
        """The files that it was loaded from; checkpoints keep copies of them."""
        ...


def end_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """All ids that end a generated text: end of document, end of sequence and, in chat vocabularies, end of turn."""
    ends = (tokenizer.eod, tokenizer.eos, *getattr(tokenizer, "turn_ends", ()))
    return frozenset(end for end in ends if end is not None)


def dropped_bytes(tokenizer: Tokenizer) -> bytes:
    """The byte values of UTF-8 text for which the tokenizer has no token, so that it drops them."""
    return getattr(tokenizer, "missing_bytes", b"")


def padding_id(tokenizer: Tokenizer) -> int | None:
    """The id that may be masked as padding; None if there is no `pad`, or if it is also `eod`, `eos` or `bos`.

    Megatron-LM writes -1 instead of None.
    """
    return None if tokenizer.pad in (tokenizer.eod, tokenizer.eos, tokenizer.bos) else tokenizer.pad


def digest(*parts: bytes) -> str:
    """The SHA-256, as hexadecimal digits, of the parts, each preceded by its length."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The JSON text of a value with sorted keys: the same for any spacing and order of keys in the file."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
