"""Bytes without a token in a byte-level vocabulary; the `tokenizers` library drops them without an error."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_SYMBOLS = {byte: chr(byte) for byte in _SHOWN}
"""The character that represents each byte in GPT-2's vocabulary and later byte-level ones (Radford et al. 2019)."""
BYTE_SYMBOLS |= {byte: chr(0x100 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in BYTE_SYMBOLS)}

NOT_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


def missing_bytes(vocabulary: Mapping[str, int], model: Mapping[str, Any], pre_tokenizer: object) -> bytes:
    """The byte values of UTF-8 that a byte-level BPE drops; empty with an unknown token or a byte fallback.

    vocabulary: the model's, without added tokens. model, pre_tokenizer: as in a tokenizer.json.
    """
    if model.get("type", "BPE") != "BPE" or model.get("unk_token") is not None or model.get("byte_fallback"):
        return b""
    if '"ByteLevel"' not in json.dumps(pre_tokenizer):
        return b""
    absent = (byte for byte, symbol in BYTE_SYMBOLS.items() if symbol not in vocabulary)
    return bytes(sorted(set(absent) - NOT_IN_UTF8))


def count_bytes(texts: Iterable[str], wanted: bytes) -> int:
    """Count the bytes of the texts whose values are in ``wanted``."""
    if not wanted:
        return 0
    unwanted = bytes(set(range(256)) - set(wanted))
    return sum(len(text.encode("utf-8", "replace").translate(None, unwanted)) for text in texts)


def add_missing_bytes(tokenizer_json: dict[str, Any]) -> int:
    """Add a token for every missing byte, with ids after all others; return the first new id."""
    vocabulary = tokenizer_json["model"]["vocab"]
    first = 1 + max([*vocabulary.values(), *(token["id"] for token in tokenizer_json.get("added_tokens", []))])
    absent = [symbol for symbol in BYTE_SYMBOLS.values() if symbol not in vocabulary]
    vocabulary |= {symbol: first + n for n, symbol in enumerate(absent)}
    return first
