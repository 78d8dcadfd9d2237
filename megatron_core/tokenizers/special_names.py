"""What published vocabularies call their special tokens, and the files beside a `tokenizer.json` that say so."""

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_core.errors import ConfigError

# What the published vocabularies call the end of a document. A chat model's vocabulary may hold several; the
# first here is the one its pre-training used (a turn's end, such as <|im_end|>, ends no document).
END_OF_DOCUMENT = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",  # DeepSeek writes it with these two look-alike signs
    "<|eos|>",
    "<eod>",
)
BEGIN_OF_SEQUENCE = ("<|begin_of_text|>", "<s>", "<bos>", "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<|bos|>")
PADDING = ("<pad>", "<|pad|>", "[PAD]")

# Read in this order, so that the second wins where both name a token, as it does in the `transformers` library.
NAME_FILES = ("special_tokens_map.json", "tokenizer_config.json")
_KEYS = ("bos_token", "eos_token", "pad_token")


def first_id(names: tuple[str, ...], vocabulary: Mapping[str, int]) -> int | None:
    """The id of the first of the names that the vocabulary has."""
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def name_files(folder: Path) -> list[Path]:
    """The files of the folder that name special tokens."""
    return [folder / name for name in NAME_FILES if (folder / name).is_file()]


def named_tokens(folder: Path) -> dict[str, str]:
    """The tokens that the files of the folder name, under bos_token, eos_token and pad_token.

    A token is written as text, or as an object whose `content` is the text. ConfigError: a file is no JSON object.
    """
    found: dict[str, str] = {}
    for path in name_files(folder):
        content = _object(path)
        for key in _KEYS:
            token = content.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
    return found


def _object(path: Path) -> dict:
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}); copy it again, or remove it to go without") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path} holds a {type(content).__name__}, expected an object; copy it again, or remove it to go without"
        )
    return content
