"""Ids of special tokens that a config.json names, kept in the configuration for export."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_core.text_file import parse_json

KEYS = tuple(f"{name}_token_id" for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eod", "decoder_start"))
"""Keys of config.json; ``transformers`` reads the first three in every model."""
LARGEST = 2**31 - 1


def is_token_id(value: object) -> bool:
    """Whether ``value`` is an id, a list of ids, or -1, which stands for no token in early files."""
    values = value if isinstance(value, list) else [value]
    return all(type(item) is int and -1 <= item <= LARGEST for item in values)


def token_ids_json(hf_config: Mapping[str, Any]) -> str:
    """The ids in a config.json as JSON; a key that is absent there is absent here, null remains null."""
    return json.dumps({key: hf_config[key] for key in KEYS if key in hf_config})


def read_token_ids(text: str) -> dict[str, Any]:
    """The inverse of ``token_ids_json``. Errors: ``ValueError``."""
    content = parse_json(text)
    if not isinstance(content, dict) or not content.keys() <= set(KEYS):
        raise ValueError(f"it must be an object with the keys {', '.join(KEYS)}")
    if not all(value is None or is_token_id(value) for value in content.values()):
        raise ValueError("its values must be ids, lists of ids or null")
    return content


def is_token_ids_json(text: str) -> bool:
    """Whether ``read_token_ids`` accepts ``text``."""
    try:
        read_token_ids(text)
    except ValueError:
        return False
    return True
