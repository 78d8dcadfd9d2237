"""Every byte is a token: no file to load, and any text can be written in it."""

from collections.abc import Sequence
from pathlib import Path

from megatron_core.tokenizers.fingerprint import digest

BYTES = 256


class ByteLevelTokenizer:
    """The 256 byte values of the UTF-8 text, and 256 as end of document."""

    vocab_size = BYTES + 1
    eod: int | None = BYTES
    bos: int | None = None
    eos: int | None = BYTES
    pad: int | None = None

    def tokenize(self, text: str) -> list[int]:
        """The text's UTF-8 bytes."""
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The UTF-8 bytes of each text."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the bytes, without end-of-document ids; U+FFFD stands for broken UTF-8."""
        return bytes(i for i in ids if i < BYTES).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """The same for every instance: there is nothing to choose."""
        return digest(b"byte level")

    def files(self) -> list[Path]:
        """None: nothing is loaded."""
        return []
