"""One way to turn what defines a tokenizer into a short identity."""

import hashlib
from typing import Any

import orjson


def digest(*parts: bytes) -> str:
    """The sha256, in hexadecimal digits, of the parts and of where each of them ends."""
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The JSON text of a value with sorted keys, so that neither spacing nor key order counts."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
