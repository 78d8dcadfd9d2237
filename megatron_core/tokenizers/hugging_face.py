"""Tokenizers in the `tokenizer.json` format, through the `tokenizers` library."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import orjson
import tokenizers

from megatron_core.errors import ConfigError
from megatron_core.tokenizers.fingerprint import canonical_json, digest
from megatron_core.tokenizers.special_names import (
    BEGIN_OF_SEQUENCE,
    END_OF_DOCUMENT,
    PADDING,
    first_id,
    name_files,
    named_tokens,
)

FILE_NAME = "tokenizer.json"

# These two keys cut or pad what is encoded, which would lose text without a word; they play no part here.
IGNORED_KEYS = ("truncation", "padding")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, or a folder that holds one.

    Special tokens that the file's post-processor would add (a begin-of-text id, say) are not added. A special
    token written out in the text becomes its id, as it does in the `transformers` library.

    `bos`, `eos` and `pad` are what `tokenizer_config.json` or `special_tokens_map.json` beside the file name, else the
    token of a usual name. `eod` is the token of a usual name before it is `eos`: a chat model's `eos` ends a turn.
    These two files decide no id of a text: they belong to `files`, and not to the fingerprint.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = _find(Path(path))
        self._tokenizer = _load(self._path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids can have gaps, and the model needs a row for the largest one: this is not the number of entries.
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        named = named_tokens(self._path.parent)
        usual_end = first_id(END_OF_DOCUMENT, vocabulary)
        self.bos = vocabulary.get(named.get("bos_token", ""), first_id(BEGIN_OF_SEQUENCE, vocabulary))
        self.eos = vocabulary.get(named.get("eos_token", ""), usual_end)
        self.pad = vocabulary.get(named.get("pad_token", ""), first_id(PADDING, vocabulary))
        self.eod = self.eos if usual_end is None else usual_end

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, on all cores unless TOKENIZERS_PARALLELISM=false."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def fingerprint(self) -> str:
        """Over the file's content, whatever its spacing and key order."""
        return self._fingerprint

    def files(self) -> list[Path]:
        """The `tokenizer.json`, and the files beside it that name special tokens."""
        return [self._path, *name_files(self._path.parent)]

    @cached_property
    def _fingerprint(self) -> str:
        content = orjson.loads(self._path.read_bytes())
        kept = {key: value for key, value in content.items() if key not in IGNORED_KEYS}
        return digest(b"hugging face", canonical_json(kept))


def _find(path: Path) -> Path:
    file = path / FILE_NAME if path.is_dir() else path
    if file.is_file():
        return file
    if (path / "tokenizer.model").is_file():
        raise ConfigError(
            f"--tokenizer-model {path} holds no {FILE_NAME} but a tokenizer.model; "
            f"use --tokenizer-type SentencePieceTokenizer --tokenizer-model {path / 'tokenizer.model'}"
        )
    raise ConfigError(
        f"--tokenizer-model {path}: there is no file {file}; give a {FILE_NAME} or a folder that holds one "
        "(names on the Hugging Face hub are not fetched: download the file first)"
    )


def _load(file: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"--tokenizer-model {file} is not a {FILE_NAME} that the tokenizers library reads: {error}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
