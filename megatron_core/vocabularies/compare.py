"""Comparison of two vocabularies, token by token."""

from collections.abc import Iterator, Mapping

from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.built_in import NullTokenizer
from megatron_core.vocabularies.hugging_face import LibraryTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from megatron_core.vocabularies.tik_token import TikTokenizer

LIBRARIES = LibraryTokenizer, SentencePieceTokenizer, TikTokenizer
PART = "\ufffd"
"""The text of a part of a character, which several tokens have."""


def names_its_tokens(tokenizer: Tokenizer | None) -> bool:
    """Whether a tokenizer knows the texts of its ids."""
    return tokenizer is not None and not isinstance(tokenizer, NullTokenizer)


def differing_tokens(one: Tokenizer, other: Tokenizer) -> Iterator[tuple[int, str, str]]:
    """Yield each id that is another token in ``other``, with both texts; ids that only one of them has are ignored.

    Tokenizers of the same library are compared by their entries. Others are compared by the texts of ids without spaces
    around them, because libraries treat these differently.
    """
    if one.fingerprint() == other.fingerprint():
        return
    ours = _entries(one, other)
    theirs = _entries(other, one)
    for number in sorted(ours.keys() & theirs.keys()):
        if ours[number] != theirs[number]:
            yield number, ours[number], theirs[number]


def _entries(tokenizer: Tokenizer, other: Tokenizer) -> Mapping[int, str]:
    """The tokens of ``tokenizer`` by id, in a form that those of ``other`` also have."""
    for library in LIBRARIES:
        if isinstance(tokenizer, library) and isinstance(other, library):
            return tokenizer.entries()
    texts = {number: tokenizer.detokenize([number]).strip() for number in range(tokenizer.vocab_size)}
    return {number: text for number, text in texts.items() if text and PART not in text}
