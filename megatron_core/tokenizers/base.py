"""What every tokenizer offers to the rest of the package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, with an identity that can be written down and compared.

    vocab_size: one more than the largest id that `tokenize` can give.
    eod: the id that marks the end of a document, None where the vocabulary has no such token.
    """

    vocab_size: int
    eod: int | None

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text, with no end-of-document id added."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, equal to `tokenize` of each but quicker where the library allows."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text that the token ids stand for."""
        ...

    def fingerprint(self) -> str:
        """A sha256 in hexadecimal digits over all that decides which ids a text gets."""
        ...

    def files(self) -> list[Path]:
        """The files it was loaded from, so that a checkpoint can keep copies of them."""
        ...
