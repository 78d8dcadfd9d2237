"""Tokenizers without files: bytes as tokens, and text that already consists of token ids."""

import re
from collections.abc import Sequence

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers.base import BaseTokenizer, Offsets

BYTES = 256


class ByteLevelTokenizer(BaseTokenizer):
    """One token for each byte of the UTF-8 text, ids 0 to 255; the id 256 ends a document."""

    vocab_size = BYTES + 1
    eod: int | None = BYTES
    eos: int | None = BYTES

    def tokenize(self, text: str) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(text.encode("utf-8"))

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """The text's UTF-8 bytes, and the character of each."""
        characters = [index for index, char in enumerate(text) for _ in char.encode("utf-8")]
        return self.tokenize(text), [(index, index + 1) for index in characters]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the bytes, without end-of-document ids; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < BYTES).decode("utf-8", errors="replace")

    def _identity(self) -> Sequence[bytes]:
        return (b"byte level",)


class NullTokenizer(BaseTokenizer):
    """Whitespace-separated integers in the text are the ids; the last id of the vocabulary ends a document.

    Older releases of Megatron-LM used the id `vocab_size` as end of document. There are no `bos`, `eos` and `pad`.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size {vocab_size} is too small for NullTokenizer; give 1 or more")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        """The integers of the text; DataError for a word that is not an integer in [0, vocab_size)."""
        return [self._id(word) for word in text.split()]

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """The integers of the text, and their characters."""
        return self.tokenize(text), [word.span() for word in re.finditer(r"\S+", text)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids as decimal numbers with one space between them."""
        return " ".join(str(int(i)) for i in ids)

    def _identity(self) -> Sequence[bytes]:
        return b"null", str(self.vocab_size).encode("ascii")

    def _id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit()):
            raise DataError(
                f"NullTokenizer reads whitespace-separated token ids and found {word[:40]!r}; "
                "choose a --tokenizer-type that reads text"
            )
        if int(word) >= self.vocab_size:
            raise DataError(f"token id {word[:40]} is not below --vocab-size {self.vocab_size}; raise it")
        return int(word)
