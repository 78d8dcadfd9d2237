"""What every tokenizer offers to the rest of the package."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back, with an identity that can be written down and compared.

    vocab_size: one more than the largest id that `tokenize` can give.
    eod, bos, eos, pad: the ids that mark the end of a document, the beginning and the end of a sequence, and places
    that hold no token; None where the vocabulary has no such token.

    Several of these may be one id: most vocabularies end a document with `eos`, and many published ones pad with it
    too. An `eod` in the text is a real token, whose label the model has to learn. So no loss is masked because a
    token equals `pad`, unless `pad` stands for nothing else; ask `padding_id`, never `pad`, which tokens are padding.
    Only `--eod-mask-loss` masks `eod`, where it is the input token.
    """

    vocab_size: int
    eod: int | None
    bos: int | None
    eos: int | None
    pad: int | None

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
        """A sha256 in hexadecimal digits over all that decides which ids a text gets, computed once."""
        ...

    def files(self) -> list[Path]:
        """The files it was loaded from, so that a checkpoint can keep copies of them."""
        ...


def padding_id(tokenizer: Tokenizer) -> int | None:
    """The id whose places may be masked as padding; None where `pad` is absent, or is also `eod`, `eos` or `bos`.

    Megatron-LM writes -1 in the place of None.
    """
    return None if tokenizer.pad in (tokenizer.eod, tokenizer.eos, tokenizer.bos) else tokenizer.pad
