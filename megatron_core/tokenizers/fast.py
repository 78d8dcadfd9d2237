"""Back ends that tokenize many texts at once: the `tokenizers` library and its like, and the faster `gigatoken`.

A back end gives arrays, so that no Python integer is made for a token. `gigatoken` (an optional package) reads some
tokenizers only, and is trusted only where it agrees with the tokenizer itself: see `disagreement`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megatron_core.errors import ConfigError
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.build import build_tokenizer
from megatron_core.tokenizers.hugging_face import END_OF_DOCUMENT, FILE_NAME
from megatron_core.tokenizers.tik_token import NUM_SPECIAL_TOKENS

BACKENDS = ("auto", "tokenizers", "gigatoken")
"""The values that `--tokenization-backend` can have."""

READ_BY_GIGATOKEN = (
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
)
"""The values of `--tokenizer-type` that gigatoken may serve."""

WAY_OUT = "use --tokenization-backend tokenizers"

# Encoding one by one costs 4 microseconds a text; encoding lists loads the package awkward, 0.2 s in each process.
SINGLY = 20_000

# What tokenizers treat each in their own way.
ODD_TEXTS = (
    "", " ", "  ", " \n\n \t\t  \r\n x", "a" * 300, "0123456789 3.14 1e-5", "it's we'll I'M", "\x00\x01\x7f",
    "Gr\u00fc\u00dfe na\u00efve \u00c5\u0301 e\u0301", "\u4e16\u754c\u3002", "\u0645\u0631\u062d\u0628\u0627",
    "\U0001f642\u200d\U0001f680\ufe0f", "\u00a0\u2003\u3000x\u00a0", "\u0130\ufb01\u212b\u1e9e", "\ufeffx\ufffd",
    "</s><s><pad><unk>[CLS][MASK]", "_\u2581_ \u2581",
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer by Megatron's flags."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = NUM_SPECIAL_TOKENS

    def load(self) -> Tokenizer:
        """The tokenizer; ConfigError if the flags describe none."""
        return build_tokenizer(**asdict(self))


class Backend(Protocol):
    """Tokenizes texts. name: what `--tokenization-backend` calls it."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts back to back, and the number of ids of each text [texts]."""
        ...


class TokenizerBackend:
    """The tokenizer itself, in batches."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts back to back, and the number of ids of each text [texts]."""
        ids = self._tokenizer.tokenize_batch(texts)
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=int(lengths.sum())), lengths


class GigatokenBackend:
    """`gigatoken` in the calling thread."""

    name = "gigatoken"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._singly = SINGLY

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts back to back, and the number of ids of each text [texts]."""
        self._singly -= len(texts)
        if self._singly < 0:
            layout = self._tokenizer.encode_batch(list(texts), parallel=False).layout
            offsets = np.asarray(layout.offsets.data)
            return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)
        ids = [self._tokenizer.encode(text) for text in texts]
        lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        return np.concatenate(ids) if ids else np.empty(0, np.uint32), lengths


def load_backend(files: TokenizerFiles, backend: str = "auto") -> tuple[Backend, str]:
    """The back end that serves, and for `auto` why it is not gigatoken, "" where it is or is not installed.

    ConfigError: gigatoken was asked for and is not installed or does not read the tokenizer.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"--tokenization-backend {backend} is not known; known: {', '.join(BACKENDS)}")
    reason = ""
    if backend != "tokenizers":
        try:
            return load_gigatoken(files), ""
        except ConfigError as error:
            if backend == "gigatoken":
                raise
            reason = str(error).removesuffix(f"; {WAY_OUT}") if find_spec("gigatoken") else ""
    return TokenizerBackend(files.load()), reason


def load_gigatoken(files: TokenizerFiles) -> GigatokenBackend:
    """gigatoken with the tokenizer; ConfigError if that cannot be."""
    if find_spec("gigatoken") is None:
        raise ConfigError("--tokenization-backend gigatoken: the package is not installed; pip install gigatoken")
    import gigatoken

    try:
        if files.tokenizer_type == "HuggingFaceTokenizer" and files.tokenizer_model:
            return GigatokenBackend(gigatoken.Tokenizer.from_json(_json_of(Path(files.tokenizer_model))))
        if files.tokenizer_type == "GPT2BPETokenizer":
            return GigatokenBackend(gigatoken.Tokenizer.from_json(_gpt2_json(files)))
        if files.tokenizer_type in READ_BY_GIGATOKEN and files.tokenizer_model:
            return GigatokenBackend(gigatoken.Tokenizer.from_sentencepiece(files.tokenizer_model))
    except ConfigError:
        raise
    except Exception as error:  # the package raises many kinds
        raise ConfigError(f"gigatoken does not read this tokenizer ({_one_line(error)}); {WAY_OUT}") from error
    raise ConfigError(f"gigatoken reads no {files.tokenizer_type}; {WAY_OUT}")


def odd_texts(files: TokenizerFiles) -> list[str]:
    """Texts in which back ends are likely to differ: spaces, signs, and the tokenizer's added tokens written out."""
    added = list(END_OF_DOCUMENT)
    if files.tokenizer_type == "HuggingFaceTokenizer" and files.tokenizer_model:
        added += _added_tokens(Path(files.tokenizer_model))
    # Every second of many: a large vocabulary has thousands of reserved tokens.
    written = added if len(added) < 100 else added[::2][:1000]
    return [*ODD_TEXTS, *(form for token in written for form in (token, f"a{token} b"))]


def disagreement(expected: Mapping[str, list[int]], ids: np.ndarray, lengths: np.ndarray) -> str | None:
    """The beginning of the first text that a back end gave other ids than are expected, quoted; None if none."""
    start = 0
    for (text, right), length in zip(expected.items(), lengths.tolist(), strict=True):
        if right != ids[start : start + length].tolist():
            return repr(text[:60])
        start += length
    return None


def _added_tokens(path: Path) -> list[str]:
    """The added tokens of a tokenizer.json, found without reading its vocabulary, which takes 20 ms.

    None where there is no such file: who loads the tokenizer will say so.
    """
    content = _json_of(path).decode("utf-8", errors="replace") if _file_of(path).is_file() else ""
    found = re.search(r'"added_tokens"\s*:\s*(?=\[)', content)
    tokens = json.JSONDecoder().raw_decode(content, found.end())[0] if found else []
    return [str(token.get("content", "")) for token in tokens]


def _json_of(path: Path) -> bytes:
    return _file_of(path).read_bytes()


def _file_of(path: Path) -> Path:
    return path / FILE_NAME if path.is_dir() else path


def _gpt2_json(files: TokenizerFiles) -> str:
    """GPT-2's two files as one tokenizer.json, without added tokens, as GPT2BPETokenizer has none."""
    vocabulary = json.loads(Path(str(files.vocab_file)).read_text(encoding="utf-8"))
    lines = Path(str(files.merge_file)).read_text(encoding="utf-8").splitlines()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    merges = [line for line in lines if line and not line.startswith("#version")]
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges}
    return json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
