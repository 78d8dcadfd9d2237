"""Files of byte-pair ranks for `tiktoken`: Megatron's JSON list, and OpenAI's lines of text."""

import base64
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError

ENTRY_KEYS = {"rank", "token_bytes", "token_str"}


def read_ranks(path: Path, most: int) -> list[bytes]:
    """The tokens' bytes in the order of their ranks, 0 first; at most the `most` lowest ranks.

    Megatron's file is a JSON list of {"rank", "token_bytes" (base64), "token_str"}; OpenAI's has a line
    `base64 rank` for each token.
    ConfigError: the file is absent or neither of the two, its ranks are not 0, 1, 2 ..., a token comes twice, or one
    of the 256 single bytes is not among those kept, without which some texts could not be written.
    """
    if not path.is_file():
        raise ConfigError(f"--tokenizer-model {path}: no such file; {_EXPECTED}")
    content = path.read_bytes()
    entries = _json_entries(path, content) if content.lstrip()[:1] == b"[" else _line_entries(path, content)
    tokens = list(_in_order(path, entries))[:most]
    missing = {bytes([byte]) for byte in range(256)}.difference(tokens)
    if missing:
        raise ConfigError(
            f"--tokenizer-model {path} has no token for the single byte 0x{min(missing).hex()} among its first "
            f"{len(tokens)} ranks; {_EXPECTED}"
        )
    return tokens


_EXPECTED = (
    'give a JSON list of {"rank", "token_bytes", "token_str"} as Megatron-LM reads, or a .tiktoken file of lines '
    "`base64 rank`"
)


def _json_entries(path: Path, content: bytes) -> Iterator[tuple[str, str | bytes, Any]]:
    """Place, base64 text and rank of each entry."""
    try:
        entries = json.loads(content)
    except ValueError as error:
        raise ConfigError(f"--tokenizer-model {path} begins as JSON and is none ({error}); {_EXPECTED}") from error
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or entry.keys() != ENTRY_KEYS:
            found = ", ".join(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
            raise ConfigError(f"--tokenizer-model {path}, entry {number} has {found or 'nothing'}; {_EXPECTED}")
        yield f"entry {number}", entry["token_bytes"], entry["rank"]


def _line_entries(path: Path, content: bytes) -> Iterator[tuple[str, str | bytes, Any]]:
    for number, line in enumerate(content.splitlines(), start=1):
        parts = line.split()
        if parts and (len(parts) != 2 or not parts[1].isdigit()):
            raise ConfigError(f"--tokenizer-model {path}, line {number} is no `base64 rank`; {_EXPECTED}")
        if parts:
            yield f"line {number}", parts[0], int(parts[1])


def _in_order(path: Path, entries: Iterable[tuple[str, str | bytes, Any]]) -> dict[bytes, int]:
    """Each token's rank; the keys are in the order of the ranks."""
    tokens: dict[bytes, int] = {}
    for place, text, rank in entries:
        if rank != len(tokens):
            raise ConfigError(
                f"--tokenizer-model {path}, {place} has rank {rank}, expected {len(tokens)}: the ranks count up from "
                "0 in the order of the file; sort or mend it"
            )
        try:
            token = base64.b64decode(text, validate=True)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--tokenizer-model {path}, {place} has no base64 text ({error}); {_EXPECTED}") from error
        if not token or token in tokens:
            fault = f"the token {token!r}, which has rank {tokens[token]} already" if token else "an empty token"
            raise ConfigError(f"--tokenizer-model {path}, {place} has {fault}; remove one of them and count again")
        tokens[token] = rank
    return tokens
