"""Tokenizers in the `tokenizer.json` format, and GPT-2's from its two files, through the `tokenizers` library."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from megatron_core import foreign_json
from megatron_core.errors import ConfigError, quoted
from megatron_core.text_file import read_table
from megatron_core.tokenizers.base import BaseTokenizer, Offsets, canonical_json
from megatron_core.vocabularies.byte_symbols import missing_bytes
from megatron_core.vocabularies.companions import GENERATION_FILE, NAME_FILES, companion_files, other_vocabularies

FILE_NAME = "tokenizer.json"

_TABLES = read_table(__file__)
END_OF_DOCUMENT, BEGIN_OF_SEQUENCE, PADDING, END_OF_TURN = (
    tuple(_TABLES[name]) for name in ("end_of_document", "begin_of_sequence", "padding", "end_of_turn")
)

_REMEDY = "copy it again, or remove it to use the usual names"
_KEYS = ("bos_token", "eos_token", "pad_token")

# Keys that make the library truncate or pad texts. They are ignored, because text would be lost without an error.
IGNORED_KEYS = ("truncation", "padding")


class LibraryTokenizer(BaseTokenizer):
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocabulary: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        # Not the number of entries: ids can have gaps, and the embedding needs a row for the largest id.
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self.missing_bytes = _missing(tokenizer)

    def tokenize(self, text: str) -> list[int]:
        """The token ids of one text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_with_offsets(self, text: str) -> tuple[list[int], Offsets]:
        """The token ids of one text, and the characters of each."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, on all cores unless TOKENIZERS_PARALLELISM=false."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

    def entries(self) -> dict[int, str]:
        """The entries of the vocabulary, added tokens included, by their ids."""
        return {number: entry for entry, number in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def to_json(self) -> str | bytes:
        """The tokenizer as a `tokenizer.json`."""
        return self._tokenizer.to_str()

    def added_ids(self) -> frozenset[int]:
        """The ids of added tokens."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def added_tokens(self) -> list[str]:
        """The texts of added tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]


class HuggingFaceTokenizer(LibraryTokenizer):
    """A `tokenizer.json`, or a folder that contains one.

    Special tokens of the file's post-processor are not added; `ids_before_prompt` are those before a text, such as a
    begin-of-text id. A special token in the text becomes its id, as in the `transformers` library.

    `bos`, `eos` and `pad` come from `tokenizer_config.json` or `special_tokens_map.json` in the same folder, else from
    a list of usual names. `turn_ends` are further ids that end a generated text: `declared_ends`, those in
    `generation_config.json`, and special tokens with a usual name for the end of a turn.
    """

    # These files do not affect the ids of a text: they are in `files`, but not in the fingerprint.

    def __init__(self, path: str | Path) -> None:
        self._path = _find(Path(path))
        tokenizer = _load(self._path)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        model = tokenizer.model
        if isinstance(model, models.WordLevel | models.WordPiece) and model.unk_token not in vocabulary:
            raise ConfigError(
                f"--tokenizer-model {self._path}: the token for unknown words, {model.unk_token!r}, is not in the "
                "vocabulary, so unknown words have no id; add it to the file"
            )
        super().__init__(tokenizer, vocabulary)
        self.ids_before_prompt = _ids_before(tokenizer)
        # It would exclude spaces from the characters of tokens.
        tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
        named = named_tokens(self._path.parent)
        usual_end = first_id(END_OF_DOCUMENT, vocabulary)
        self.bos = vocabulary.get(named.get("bos_token", ""), first_id(BEGIN_OF_SEQUENCE, vocabulary))
        self.eos = vocabulary.get(named.get("eos_token", ""), usual_end)
        self.pad = vocabulary.get(named.get("pad_token", ""), first_id(PADDING, vocabulary))
        # The usual names come first, because the `eos` of a chat model ends a turn, not a document.
        self.eod = self.eos if usual_end is None else usual_end
        special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        named_ends = (special[name] for name in END_OF_TURN if name in special)
        self.declared_ends = generation_ends(self._path.parent)
        self.turn_ends = tuple(dict.fromkeys([*self.declared_ends, *named_ends]))

    def files(self) -> list[Path]:
        """The `tokenizer.json`, and the files next to it that `transformers` keeps with it."""
        return [self._path, *companion_files(self._path.parent), *other_vocabularies(self._path)]

    def to_json(self) -> str | bytes:
        """The content of the file."""
        return self._path.read_bytes()

    def _identity(self) -> Sequence[bytes]:
        # The values in the file; spacing and order of keys do not matter.
        content = orjson.loads(self._path.read_bytes())
        content_ = {key: value for key, value in content.items() if key not in IGNORED_KEYS}
        return b"hugging face", canonical_json(content_)


class GPT2BPETokenizer(LibraryTokenizer):
    """GPT-2's `vocab.json` and `merges.txt`.

    `<|endoftext|>` in the text is encoded as ordinary text; only `eod` and `eos` give its id.
    """

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        self._vocab_file = _existing("--vocab-file", vocab_file)
        self._merge_file = _existing("--merge-file", merge_file)
        tokenizer = _load_gpt2(self._vocab_file, self._merge_file)
        vocabulary = tokenizer.get_vocab()
        super().__init__(tokenizer, vocabulary)
        self.eod = self.eos = vocabulary.get(END_OF_DOCUMENT[0])
        self.special_as_text = END_OF_DOCUMENT[:1]

    def files(self) -> list[Path]:
        """The vocabulary file, the merges file, and the files that `transformers` keeps with them."""
        return [self._vocab_file, self._merge_file, *companion_files(self._vocab_file.parent)]

    def _identity(self) -> Sequence[bytes]:
        vocabulary = json.loads(self._vocab_file.read_bytes())
        merges = self._merge_file.read_text(encoding="utf-8-sig").splitlines()
        ranked = [line for line in merges if line and not line.startswith("#version")]
        return b"gpt2 bpe", canonical_json(vocabulary), "\n".join(ranked).encode("utf-8")


def _ids_before(tokenizer: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The ids that the file's post-processor puts before a text."""
    encoding = tokenizer.encode("0", add_special_tokens=True)
    added = encoding.special_tokens_mask
    return tuple(encoding.ids[: added.index(0)] if 0 in added else ())


def _existing(flag: str, path: str | Path) -> Path:
    if not Path(path).is_file():
        raise ConfigError(f"{flag} {path}: no such file; GPT2BPETokenizer needs GPT-2's vocab.json and merges.txt")
    return Path(path)


def _load_gpt2(vocab_file: Path, merge_file: Path) -> tokenizers.Tokenizer:
    try:
        model = models.BPE.from_file(str(vocab_file), str(merge_file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"--vocab-file {vocab_file} and --merge-file {merge_file} are not a BPE vocabulary and its merges: {error}"
        ) from error
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _missing(tokenizer: tokenizers.Tokenizer) -> bytes:
    """The bytes that the tokenizer drops, from its parts: serializing all of it would include the vocabulary."""
    model = tokenizer.model
    pre_tokenizer = tokenizer.pre_tokenizer
    if not isinstance(model, models.BPE) or pre_tokenizer is None:
        return b""
    settings = {"unk_token": model.unk_token, "byte_fallback": model.byte_fallback}
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    return missing_bytes(vocabulary, settings, orjson.loads(pre_tokenizer.__getstate__()))


def _find(path: Path) -> Path:
    file = path / FILE_NAME if path.is_dir() else path
    if file.is_file():
        return file
    if (path / "tokenizer.model").is_file():
        raise ConfigError(
            f"--tokenizer-model {path} contains a tokenizer.model and no {FILE_NAME}; "
            f"use --tokenizer-type SentencePieceTokenizer --tokenizer-model {path / 'tokenizer.model'}"
        )
    raise ConfigError(
        f"--tokenizer-model {path}: no such file: {file}; give a {FILE_NAME} or a folder that contains one "
        "(nothing is downloaded from the Hugging Face hub: download the file first)"
    )


def _load(file: Path) -> tokenizers.Tokenizer:
    _check_prefix(file)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:  # the library raises Exception, and panics derived from BaseException
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"--tokenizer-model {file} is not a {FILE_NAME} that the tokenizers library reads: {error}"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_prefix(file: Path) -> None:
    """ConfigError for merges without the prefix of continued words; tokenizers 0.23 aborts the process on them."""
    model = read_tokenizer_object(file).get("model")
    model = model if isinstance(model, dict) else {}
    prefix = model.get("continuing_subword_prefix")
    merges = model.get("merges")
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(pair, list) and len(pair) == 2 and str(pair[1]).startswith(prefix)):
            raise ConfigError(
                f"--tokenizer-model {file}: the merge {quoted(merge)} does not continue a word with "
                f"continuing_subword_prefix={quoted(prefix)}; copy the file again"
            )


def first_id(names: tuple[str, ...], vocabulary: Mapping[str, int]) -> int | None:
    """The id of the first of ``names`` that is in the vocabulary; None if none is."""
    return next((vocabulary[name] for name in names if name in vocabulary), None)


def named_tokens(folder: Path) -> dict[str, str]:
    """The special tokens, such as bos_token, in the files of the folder.

    A value is the token's text, or an object whose `content` is the text.
    ConfigError: a file is not a JSON object, or bos_token, eos_token or pad_token has another value.
    """
    tokens: dict[str, str] = {}
    for path in (folder / name for name in NAME_FILES):
        content = read_tokenizer_object(path) if path.is_file() else {}
        for key, value in content.items():
            token = value.get("content") if isinstance(value, dict) else value
            if isinstance(token, str) and key.endswith("_token"):
                tokens[key] = token
            elif key in _KEYS and value is not None:
                raise ConfigError(f"{path}: {key} is {quoted(value)}, not the string of a token; {_REMEDY}")
    return tokens


def generation_ends(folder: Path) -> list[int]:
    """The ids in ``generation_config.json`` that end a generated text; empty without the file."""
    path = folder / GENERATION_FILE
    ends = read_tokenizer_object(path).get("eos_token_id") if path.is_file() else None
    if ends is None:
        return []
    ids = ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and end >= 0 for end in ids):
        raise ConfigError(
            f"{path}: eos_token_id is {quoted(ends)}, not an id or a list of ids; copy the file again, or correct it"
        )
    return ids


def read_tokenizer_object(path: Path) -> dict:
    """The object in a JSON file of a tokenizer. Errors: ``ConfigError``."""
    return foreign_json.read_object(path, ConfigError, _REMEDY)
