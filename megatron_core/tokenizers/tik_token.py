"""Byte-level BPE through the `tiktoken` library, with Megatron's special tokens before the ranks."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tiktoken

from megatron_core.errors import ConfigError, DataError
from megatron_core.tokenizers.fingerprint import digest
from megatron_core.tokenizers.rank_file import read_ranks

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
NUM_SPECIAL_TOKENS = 1000

# What Megatron-LM takes where --vocab-size is not given; a longer file is cut to it.
MAX_VOCABULARY = 2**17

# The two ways of cutting text into words that its flags name. Each alternative is tried in turn; a word's bytes are
# merged by rank, and never with those of another word. They have to be the same to the letter, or ids differ.
PATTERNS = {
    "v1": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
    "v2": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
}
DEFAULT_PATTERN = "v2"


class TikTokenizer:
    """A file of byte-pair ranks, as Megatron's TikTokenizer reads it: rank r is the id `num_special_tokens` + r.

    The ids below are `<unk> <s> </s> <mask> <pad> <cls> <sep>` and then `<SPECIAL_7>`, `<SPECIAL_8>` ...; `</s>` ends a
    document. A special token written out in the text is text like any other. OpenAI's rank files are read too; their
    ids are then these, not the ones of OpenAI's encodings, which put no special tokens first and have other patterns.

    pattern: how text is cut into words, v1 or v2 (the default). vocab_size: ids in all, specials included; the lowest
    ranks are kept. Without it all are, up to Megatron's 131,072. Nothing is ever downloaded.
    ConfigError: the file is no file of ranks, or a setting does not fit it.
    """

    def __init__(
        self,
        path: str | Path,
        pattern: str | None = None,
        num_special_tokens: int = NUM_SPECIAL_TOKENS,
        vocab_size: int | None = None,
    ) -> None:
        self._path = Path(path)
        self._pattern = DEFAULT_PATTERN if pattern is None else pattern
        _check_settings(self._pattern, num_special_tokens, vocab_size)
        limit = MAX_VOCABULARY if vocab_size is None else vocab_size
        self._tokens = read_ranks(self._path, limit - num_special_tokens)
        self._special = special_tokens(num_special_tokens)
        self._encoding = tiktoken.Encoding(
            self._path.name,
            pat_str=PATTERNS[self._pattern],
            mergeable_ranks={token: num_special_tokens + rank for rank, token in enumerate(self._tokens)},
            special_tokens=self._special,
        )
        self.vocab_size = num_special_tokens + len(self._tokens)
        self.bos: int | None = self._special["<s>"]
        self.eos: int | None = self._special["</s>"]
        self.pad: int | None = self._special.get("<pad>")
        self.eod = self.eos

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text; DataError for more blanks in a row than tiktoken can match."""
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            # The library's matcher overflows its stack (seen with 1,000,000 blanks, not with 500,000), and what it
            # raises then is no Exception, and has no name to import.
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"tiktoken cannot cut a text of {len(text)} characters into words ({error}); it holds a very long "
                "run of blanks: shorten or remove the document"
            ) from error

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, in one thread; data preparation runs several processes instead."""
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included; U+FFFD stands for broken UTF-8."""
        return self._encoding.decode([int(i) for i in ids])

    def fingerprint(self) -> str:
        """Over the pattern, the number of special tokens and the ranks that are kept, whichever file they are from."""
        return self._fingerprint

    def files(self) -> list[Path]:
        """The one file of ranks."""
        return [self._path]

    @cached_property
    def _fingerprint(self) -> str:
        settings = f"{PATTERNS[self._pattern]} {len(self._special)}"
        return digest(b"tiktoken", settings.encode("ascii"), *self._tokens)


def special_tokens(count: int) -> dict[str, int]:
    """The id of each special token, by Megatron's names."""
    names = [*SPECIAL_TOKENS, *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL_TOKENS), count))]
    return {name: i for i, name in enumerate(names[:count])}


def _check_settings(pattern: str, num_special_tokens: int, vocab_size: int | None) -> None:
    if pattern not in PATTERNS:
        raise ConfigError(f"--tiktoken-pattern {pattern} is not known; known: {', '.join(PATTERNS)}")
    if num_special_tokens < 3:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {num_special_tokens} leaves out one of <unk>, <s>, </s>; give at least 3"
        )
    if num_special_tokens + 256 > MAX_VOCABULARY and vocab_size is None:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {num_special_tokens} leaves no room for the 256 bytes in the "
            f"{MAX_VOCABULARY} ids that are taken without --vocab-size; lower it, or give --vocab-size"
        )
    if vocab_size is not None and vocab_size < num_special_tokens + 256:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: --tiktoken-num-special-tokens {num_special_tokens} and the 256 "
            f"bytes make {num_special_tokens + 256}"
        )
