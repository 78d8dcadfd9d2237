"""Back ends give the tokenizer's own ids, as arrays, or the reason why they cannot be used."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_core.errors import ConfigError
from megatron_core.preprocess import backends
from megatron_core.preprocess.backends import TokenizerBackend, disagreement, load_backend, odd_texts
from megatron_core.tokenizers.build import TokenizerFiles
from tests.vocabularies.corpus import (
    DROPPED_TEXTS,
    MISSING,
    TEXTS,
    write_gpt2_files,
    write_sentence_piece,
    write_tokenizer_json,
)

KINDS = ["HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "ByteLevelTokenizer"]
SPECIAL = ["<|endoftext|>", "x<|endoftext|>y <|endoftext|>", " <|endoftext|>\n"]


def files_of(kind: str, folder: Path) -> TokenizerFiles:
    """A tokenizer of the kind, written to the folder."""
    if kind == "HuggingFaceTokenizer":
        return TokenizerFiles(kind, tokenizer_model=str(write_tokenizer_json(folder)))
    if kind == "folder":
        write_tokenizer_json(folder)
        return TokenizerFiles("HuggingFaceTokenizer", tokenizer_model=str(folder))
    if kind == "GPT2BPETokenizer":
        vocabulary, merges = write_gpt2_files(folder)
        return TokenizerFiles(kind, vocab_file=str(vocabulary), merge_file=str(merges))
    if kind == "SentencePieceTokenizer":
        return TokenizerFiles(kind, tokenizer_model=str(write_sentence_piece(folder)))
    return TokenizerFiles(kind)


def compare(backend: backends.Backend, files: TokenizerFiles, texts: Sequence[str]) -> None:
    """Every text's ids, one by one."""
    tokenizer = files.load()
    ids, lengths = backend.encode(texts)
    assert lengths.tolist() == [len(tokenizer.tokenize(text)) for text in texts]
    assert ids.tolist() == [token for text in texts for token in tokenizer.tokenize(text)]
    expected = {text: tokenizer.tokenize(text) for text in texts}
    assert disagreement(expected, *backend.encode(list(expected))) is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_gives_the_tokenizers_ids(kind: str, tmp_path: Path) -> None:
    files = files_of(kind, tmp_path)
    backend, reason = load_backend(files.load(), "tokenizers")
    assert (backend.name, reason) == ("tokenizers", "")
    compare(backend, files, TEXTS + SPECIAL)
    ids, lengths = backend.encode([])
    assert len(ids) == len(lengths) == 0


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "folder", "GPT2BPETokenizer"])
@pytest.mark.parametrize("singly", [0, 10**6])
def test_gigatoken_gives_the_tokenizers_ids(
    kind: str, singly: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "SINGLY", singly)
    files = files_of(kind, tmp_path)
    backend, reason = load_backend(files.load())
    assert (backend.name, reason) == ("gigatoken", "")
    compare(backend, files, TEXTS + SPECIAL + odd_texts(files.load()))
    ids, lengths = backend.encode([])
    assert len(ids) == len(lengths) == 0
    ids, lengths = backend.encode(["", ""])
    assert len(ids) == 0 and lengths.tolist() == [0, 0]


def test_a_tokenizer_that_gigatoken_does_not_read(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    path.write_text(json.dumps(content))
    files = TokenizerFiles("HuggingFaceTokenizer", tokenizer_model=str(path))
    backend, reason = load_backend(files.load())
    assert backend.name == "tokenizers"
    assert reason.startswith("gigatoken does not support this tokenizer (") and "\n" not in reason
    with pytest.raises(
        ConfigError, match=r"gigatoken does not support this tokenizer .*--tokenization-backend tokenizers"
    ):
        load_backend(files.load(), "gigatoken")


def test_gigatoken_with_a_vocabulary_that_lacks_bytes(tmp_path: Path) -> None:
    """It has the tokenizer's ids for all texts, also if letters are merged over a dropped byte."""
    path = write_tokenizer_json(tmp_path, ("<|endoftext|>", "<|last|>"), without=MISSING + b"\xff")
    files = TokenizerFiles("HuggingFaceTokenizer", tokenizer_model=str(path))
    backend, reason = load_backend(files.load())
    assert (backend.name, reason) == ("gigatoken", "")
    for texts in (
        TEXTS,
        DROPPED_TEXTS,
        DROPPED_TEXTS[2:3],
        [*TEXTS, *DROPPED_TEXTS, *SPECIAL, *odd_texts(files.load())],
    ):
        compare(backend, files, texts)
    assert backend.encode(["th\u00aae"])[0].tolist() == files.load().tokenize("the")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    files = TokenizerFiles("ByteLevelTokenizer")
    backend, reason = load_backend(files.load())
    assert (backend.name, reason) == ("tokenizers", "")
    with pytest.raises(ConfigError, match="the package is not installed; pip install gigatoken"):
        load_backend(files.load(), "gigatoken")


def test_unknown_names_are_told() -> None:
    with pytest.raises(ConfigError, match="--tokenization-backend fast is not supported; supported: auto"):
        load_backend(TokenizerFiles("ByteLevelTokenizer").load(), "fast")
    with pytest.raises(ConfigError, match="--tokenizer-type Foo is not supported"):
        load_backend(TokenizerFiles("Foo").load())


def test_a_disagreement_is_quoted() -> None:
    tokenizer = TokenizerFiles("ByteLevelTokenizer").load()
    texts = ["abc", "de", ""]
    ids, lengths = TokenizerBackend(tokenizer).encode(texts)
    expected = {text: tokenizer.tokenize(text) for text in texts}
    assert disagreement(expected, ids, lengths) is None
    wrong = np.array(ids)
    wrong[3] += 1
    assert disagreement(expected, wrong, lengths) == "'de'"
    assert disagreement(expected, ids, np.array([2, 3, 0])) == "'abc'"


def test_odd_texts_have_the_added_tokens_in_them(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path, ("<|endoftext|>", "<|mine|>"))
    texts = odd_texts(TokenizerFiles("HuggingFaceTokenizer", tokenizer_model=str(path)).load())
    assert "<|mine|>" in texts and "a<|mine|> b" in texts and "" in texts
