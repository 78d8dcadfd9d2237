"""A tokenizer for text that holds token ids already."""

from collections.abc import Sequence
from pathlib import Path

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers.fingerprint import digest


class NullTokenizer:
    """Whitespace-separated integers in the text are the ids; the last id of the vocabulary ends a document.

    Older releases of Megatron-LM counted one id more and used `vocab_size` itself as end of document. Nothing begins
    a sequence, ends one, or pads it.
    """

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size {vocab_size} leaves no token; NullTokenizer needs at least 1")
        self.vocab_size = vocab_size
        self.eod: int | None = vocab_size - 1

    def tokenize(self, text: str) -> list[int]:
        """The integers of the text; DataError for a word that is no integer in [0, vocab_size)."""
        return [self._id(word) for word in text.split()]

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The integers of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The ids as decimal numbers with one space between them."""
        return " ".join(str(int(i)) for i in ids)

    def fingerprint(self) -> str:
        """Decided by the vocabulary's size alone."""
        return digest(b"null", str(self.vocab_size).encode("ascii"))

    def files(self) -> list[Path]:
        """None: nothing is loaded."""
        return []

    def _id(self, word: str) -> int:
        if not (word.isascii() and word.isdigit()):
            raise DataError(
                f"NullTokenizer reads whitespace-separated token ids and found {word[:40]!r}; "
                "choose a --tokenizer-type that reads text"
            )
        if int(word) >= self.vocab_size:
            raise DataError(f"token id {word[:40]} does not fit --vocab-size {self.vocab_size}; raise it")
        return int(word)
