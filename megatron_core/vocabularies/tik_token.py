"""Byte-level BPE through the `tiktoken` library, with Megatron's special tokens before the ranks."""

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tiktoken

from megatron_core.errors import ConfigError, DataError, quoted
from megatron_core.tokenizers.base import BaseTokenizer, Offsets
from megatron_core.tokenizers.build import NUM_SPECIAL_TOKENS
from megatron_core.vocabularies.companions import companion_files

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")

# Megatron-LM's default vocabulary size; higher ranks of a larger file are ignored.
MAX_VOCABULARY = 2**17

# The values of --tiktoken-pattern, regular expressions that split text into words; bytes are merged only within a word.
# They must be exactly Megatron-LM's, or ids differ.
PATTERNS = {
    "v1": "|".join(
        [r"[^\r\n\p{L}\p{N}]?+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"]
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

ENTRY_KEYS = {"rank", "token_bytes", "token_str"}
_EXPECTED = (
    'give a JSON list of {"rank", "token_bytes", "token_str"} as Megatron-LM reads, or a .tiktoken file of lines '
    "`base64 rank`"
)


class TikTokenizer(BaseTokenizer):
    """A file of byte-pair ranks, as Megatron's TikTokenizer reads it: rank r has the id `num_special_tokens` + r.

    The ids below `num_special_tokens` are `<unk> <s> </s> <mask> <pad> <cls> <sep> <SPECIAL_7> <SPECIAL_8>` ...; `</s>`
    ends a document. A special token in the text is encoded as ordinary text.

    pattern: how text is split into words, v1 or v2 (the default). vocab_size: number of ids with special tokens; only
    the lowest ranks are kept. Default: all, up to Megatron's 131,072.
    ConfigError: the file is not a file of ranks, or a setting does not fit it.
    """

    # OpenAI's rank files are read too, but the ids are not those of OpenAI's encodings, which have no special tokens
    # first and split text by other patterns. Nothing is downloaded.

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
        self.bos, self.pad = self._special["<s>"], self._special.get("<pad>")
        self.eos = self.eod = self._special["</s>"]
        self.special_as_text = list(self._special)

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text; DataError if tiktoken cannot match a long run of spaces in it."""
        try:
            return self._encoding.encode_ordinary(text)
        except BaseException as error:
            # The library's regular expressions overflow the stack (with 1,000,000 spaces, not with 500,000). The error
            # that it raises then is not an Exception, and its class cannot be imported.
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"tiktoken cannot split a text of {len(text)} characters into words ({error}); it contains a very long "
                "run of spaces: shorten or remove the document"
            ) from error

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """The token ids of one text, and the characters that begin in each; a character may be in several."""
        ids = self.tokenize(text)
        begins = [*self._encoding.decode_with_offsets(ids)[1], len(text)]
        return ids, [(begin, max(end, begin + 1)) for begin, end in pairwise(begins)]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included; invalid UTF-8 becomes U+FFFD."""
        return self._encoding.decode([int(i) for i in ids])

    def entries(self) -> dict[int, str]:
        """The tokens by their ids, a character for each byte."""
        special = {number: token for token, number in self._special.items()}
        tokens = enumerate(self._tokens, len(self._special))
        return special | {number: token.decode("latin-1") for number, token in tokens}

    def files(self) -> list[Path]:
        """The file of ranks, and the files that `transformers` keeps with a tokenizer."""
        return [self._path, *companion_files(self._path.parent)]

    def _identity(self) -> Sequence[bytes]:
        settings = f"{PATTERNS[self._pattern]} {len(self._special)}"
        return b"tiktoken", settings.encode("ascii"), *self._tokens


def special_tokens(count: int) -> dict[str, int]:
    """The ids of the first ``count`` special tokens, with Megatron's names."""
    names = [*SPECIAL_TOKENS, *(f"<SPECIAL_{i}>" for i in range(len(SPECIAL_TOKENS), count))]
    return {name: i for i, name in enumerate(names[:count])}


def _check_settings(pattern: str, num_special_tokens: int, vocab_size: int | None) -> None:
    if pattern not in PATTERNS:
        raise ConfigError(f"--tiktoken-pattern {pattern} is not supported; supported: {', '.join(PATTERNS)}")
    if num_special_tokens < 3:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {num_special_tokens} leaves out one of <unk>, <s>, </s>; give at least 3"
        )
    if num_special_tokens + 256 > MAX_VOCABULARY and vocab_size is None:
        raise ConfigError(
            f"--tiktoken-num-special-tokens {num_special_tokens} leaves no room for the 256 bytes in the "
            f"{MAX_VOCABULARY} ids of the default vocabulary; lower it, or give --vocab-size"
        )
    if vocab_size is not None and vocab_size < num_special_tokens + 256:
        raise ConfigError(
            f"--vocab-size {vocab_size} is too small: --tiktoken-num-special-tokens {num_special_tokens} and the 256 "
            f"bytes make {num_special_tokens + 256}; raise it, or lower the number of special tokens"
        )


def read_ranks(path: Path, most: int) -> list[bytes]:
    """The bytes of the tokens with the `most` lowest ranks, in the order of the ranks.

    Megatron's file is a JSON list of {"rank", "token_bytes" (base64), "token_str"}; OpenAI's has a line
    `base64 rank` for each token.
    ConfigError: the file is absent or has another format, its ranks are not 0, 1, 2 ..., a token occurs twice, or one
    of the 256 single bytes is missing, so that some texts could not be encoded.
    """
    if not path.is_file():
        raise ConfigError(f"--tokenizer-model {path}: no such file; {_EXPECTED}")
    data = path.read_bytes()
    entries = _json_entries(path, data) if data.lstrip()[:1] == b"[" else _line_entries(path, data)
    tokens = list(_in_order(path, entries))[:most]
    missing = {bytes([byte]) for byte in range(256)}.difference(tokens)
    if missing:
        raise ConfigError(
            f"--tokenizer-model {path} has no token for the single byte 0x{min(missing).hex()} among its first "
            f"{len(tokens)} ranks; {_EXPECTED}"
        )
    return tokens


def _json_entries(path: Path, data: bytes) -> Iterator[tuple[str, str | bytes, Any]]:
    """The name for messages, the base64 text and the rank of each entry."""
    try:
        entries = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--tokenizer-model {path} begins with [ but is not JSON ({error}); {_EXPECTED}") from error
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
            content = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
            raise ConfigError(f"--tokenizer-model {path}, entry {number} has {content or 'nothing'}; {_EXPECTED}")
        yield f"entry {number}", entry["token_bytes"], entry["rank"]


def _line_entries(path: Path, data: bytes) -> Iterator[tuple[str, str | bytes, Any]]:
    for number, line in enumerate(data.splitlines(), start=1):
        words = line.split()
        if words and (len(words) != 2 or not words[1].isdigit()):
            raise ConfigError(f"--tokenizer-model {path}, line {number} is not `base64 rank`; {_EXPECTED}")
        if words:
            yield f"line {number}", words[0], int(words[1])


def _in_order(path: Path, entries: Iterable[tuple[str, str | bytes, Any]]) -> dict[bytes, int]:
    """The rank of each token, with the tokens in the order of their ranks."""
    tokens: dict[bytes, int] = {}
    for entry, text, rank in entries:
        if type(rank) is not int or rank != len(tokens):
            raise ConfigError(
                f"--tokenizer-model {path}, {entry} has rank {quoted(rank)}, expected {len(tokens)}: ranks must count "
                "up from 0 in the order of the file; sort the file or correct the rank"
            )
        try:
            token = base64.b64decode(text, validate=True)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--tokenizer-model {path}, {entry} has no base64 text ({error}); {_EXPECTED}") from error
        if not token or token in tokens:
            fault = f"the token {token!r}, which already has rank {tokens[token]}" if token else "an empty token"
            raise ConfigError(f"--tokenizer-model {path}, {entry} has {fault}; remove it and number the ranks again")
        tokens[token] = rank
    return tokens
