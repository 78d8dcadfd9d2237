"""Differences between vocabularies, token by token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_core.tokenizers import ByteLevelTokenizer, NullTokenizer, Tokenizer
from megatron_core.vocabularies.compare import differing_tokens, names_its_tokens
from megatron_core.vocabularies.hugging_face import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from megatron_core.vocabularies.tik_token import TikTokenizer
from tests.vocabularies.corpus import write_gpt2_files, write_rank_json, write_sentence_piece, write_tokenizer_json


def swapped(file: Path, one: str, other: str) -> Path:
    """A copy of a tokenizer.json in which two tokens have each other's ids."""
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    copy = file.parent / "swapped" / file.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(json.dumps(content))
    return copy


def test_swapped_ids_are_found(tmp_path: Path) -> None:
    file = write_tokenizer_json(tmp_path)
    tokenizer = HuggingFaceTokenizer(file)
    ids = json.loads(file.read_text())["model"]["vocab"]
    different = list(differing_tokens(tokenizer, HuggingFaceTokenizer(swapped(file, "a", "b"))))
    assert sorted(different) == sorted([(ids["a"], "a", "b"), (ids["b"], "b", "a")])
    assert list(differing_tokens(tokenizer, HuggingFaceTokenizer(shutil.copytree(tmp_path, tmp_path / "copy")))) == []


def test_merges_and_formats_may_differ(tmp_path: Path) -> None:
    """GPT-2's two files with the same vocabulary; other merges change the ids of a text, and not their meaning."""
    library = HuggingFaceTokenizer(write_tokenizer_json(tmp_path))
    gpt2 = GPT2BPETokenizer(*write_gpt2_files(tmp_path))
    assert library.fingerprint() != gpt2.fingerprint()
    assert list(differing_tokens(library, gpt2)) == []


@pytest.mark.parametrize("write", [write_sentence_piece, write_rank_json])
def test_other_libraries(write, tmp_path: Path) -> None:
    made: Tokenizer = (SentencePieceTokenizer if write is write_sentence_piece else TikTokenizer)(write(tmp_path))
    entries = made.entries()
    assert len(entries) == made.vocab_size
    assert list(differing_tokens(made, made)) == []
    different = list(differing_tokens(made, ByteLevelTokenizer()))
    assert different and all(ours != theirs for _, ours, theirs in different)


def test_numbers_are_not_texts() -> None:
    assert not names_its_tokens(NullTokenizer(9)) and not names_its_tokens(None)
    assert names_its_tokens(ByteLevelTokenizer())
