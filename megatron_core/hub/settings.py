"""Ids of special tokens for exports to Hugging Face."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_core.config.data import DataConfig
from megatron_core.config.ranges import Range
from megatron_core.config.setting import ALWAYS, Resume, section, setting
from megatron_core.text_file import parse_json

_TOKENS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eod", "decoder_start")
TOKEN_ID_KEYS = tuple(f"{name}_token_id" for name in _TOKENS)
"""Keys of config.json; ``transformers`` reads the first three in every model."""
LARGEST_TOKEN_ID = 2**31 - 1


def is_token_id(value: object) -> bool:
    """Whether ``value`` is an id, a list of ids, or -1, which stands for no token in early files."""
    values = value if isinstance(value, list) else [value]
    return all(type(item) is int and -1 <= item <= LARGEST_TOKEN_ID for item in values)


def token_ids_json(hf_config: Mapping[str, Any]) -> str:
    """The ids in a config.json as JSON; a key that is absent there is absent here, null remains null."""
    return json.dumps({key: hf_config[key] for key in TOKEN_ID_KEYS if key in hf_config})


def read_token_ids(text: str) -> dict[str, Any]:
    """The inverse of ``token_ids_json``. Errors: ``ValueError``."""
    content = parse_json(text)
    if not isinstance(content, dict) or not content.keys() <= set(TOKEN_ID_KEYS):
        raise ValueError(f"it must be an object with the keys {', '.join(TOKEN_ID_KEYS)}")
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


TOKEN_IDS = Range(
    f"a JSON object of ids, lists of ids or null, with keys of {', '.join(TOKEN_ID_KEYS)}",
    is_token_ids_json,
    "does not name ids of tokens",
)


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class TokenIdConfig(DataConfig):
    """Ids of special tokens."""

    hf_token_ids: str | None = setting(None, TOKEN_IDS, when=ALWAYS, resume=Resume.TOKENS)
    """Ids of special tokens for the config.json of an export to Hugging Face, as JSON: {"eos_token_id": [2, 0]};
    default: those of the model in --load-hf, else those of the tokenizer."""
