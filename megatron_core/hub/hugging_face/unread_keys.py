"""Keys of config.json that an architecture does not read, and that may still describe the model."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_core.config import ModelConfig
from megatron_core.config.setting import Resume, names_by_resume
from megatron_core.errors import quoted
from megatron_core.foreign_json import OBJECT, KeyType
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES, IGNORED_KEYS, Architecture
from megatron_core.hub.hugging_face.rules import Settings
from megatron_core.text_file import read_table

HARMLESS = {key for keys in read_table(__file__).values() for key in keys}
"""Keys on which the logits of a text do not depend, or which repeat others."""
SIZES = {*names_by_resume(ModelConfig, Resume.SHAPE), "num_query_groups"}
"""Settings that shapes of stored tensors determine: a key with another value cannot go unnoticed."""
PATTERNS = re.compile(r"summary_.*|.*_token_ids?|.*_token_index|.*_init_scale|.*use_xavier_init|mup_base.*|_.*pattern")
OBJECTS = ("rope_parameters", "rope_scaling", "attn_config")
"""Objects whose inner keys are checked, too."""


def notes_on_unread_keys(architecture: Architecture, hf_config: Settings) -> Iterator[str]:
    """Notes about keys that say something about the model and have no effect on it.

    A key without effect is off (null, false, 0, empty) or 1, or known not to change logits.
    """
    unread = dict(_unread(architecture, hf_config, architecture.known_keys()))
    elsewhere = {key: _readers(key) for key in unread}
    name = architecture.model_type
    for key, readers in elsewhere.items():
        if readers:
            yield (
                f"config.json says {key}={quoted(unread[key])}, which has no effect on {name} models, here as "
                f"in transformers; it changes the results of {', '.join(readers[:3])}: compare the model with its "
                "authors' code, or remove the key"
            )
    unknown = [f"{key}={quoted(value)}" for key, value in unread.items() if not elsewhere[key]]
    if unknown:
        yield (
            f"config.json has keys without effect on {name} models: {', '.join(unknown)}; if the authors' code reads "
            "one of them, its results differ from those here and of transformers"
        )


def _unread(architecture: Architecture, content: Mapping[str, Any], known: set[str], inside: str = "") -> Settings:
    """Keys, with the path of the objects around them, and values that the architecture does not read."""
    unread: Settings = {}
    for key, value in content.items():
        if isinstance(value, dict) and (key in OBJECTS or inside) and key in known - IGNORED_KEYS:
            unread |= _unread(architecture, value, known, f"{inside}{key}.")
        elif not (key in known or _is_off(value) or is_harmless(key) or _is_size(key)):
            unread[f"{inside}{key}"] = value
    return unread


def _is_off(value: Any) -> bool:
    """Whether a value says that a feature is absent, or is a neutral factor."""
    return value in (None, False, "", [], {}) or (value in (0, 1) and not isinstance(value, bool))


def is_harmless(key: str) -> bool:
    """Whether the logits of no model depend on a key."""
    return key in HARMLESS or PATTERNS.fullmatch(key) is not None


def _is_size(key: str) -> bool:
    return any(architecture.keys.get(key) in SIZES for architecture in ARCHITECTURES.values())


def _readers(key: str) -> list[str]:
    """Architectures whose results depend on a key; not those that have one value of it."""
    key = key.rpartition(".")[2]
    return [architecture.model_type for architecture in ARCHITECTURES.values() if key in _meaning(architecture)]


def _meaning(architecture: Architecture) -> dict[str, KeyType | str]:
    rules: dict[str, KeyType | str] = {
        key: key_type for rule in architecture.rules for key, key_type in rule.types.items()
    }
    return {key: key_type for key, key_type in rules.items() if key_type is not OBJECT} | dict(architecture.keys)
