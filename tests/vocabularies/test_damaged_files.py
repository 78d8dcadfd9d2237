"""Damaged files of a tokenizer give one error sentence that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_core.errors import ConfigError, DataError
from megatron_core.features.conversations.chat_template import chat_template_of
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from megatron_core.vocabularies.sentence_piece import SentencePieceTokenizer
from tests.vocabularies.corpus import write_sentence_piece, write_tokenizer_json

CONFIG, NAMES, ENDS = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"


def one_sentence(make: Callable[[], object], *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "content",
    ["", "{", "null", "[]", "1", '"x"', "{}", "[" * 100_000, '{"model": 1}', '{"model": {"type": "BPE"}}', "\ufeff{}"],
)
def test_a_damaged_tokenizer_json(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    one_sentence(lambda: HuggingFaceTokenizer(tmp_path), str(tmp_path / "tokenizer.json"))


WRONG: list[tuple[str, Any]] = [
    ("model", None),
    ("model", []),
    ("added_tokens", "x"),
    ("added_tokens", [{"id": "x"}]),
    ("pre_tokenizer", 1),
    ("decoder", {"type": "x"}),
    ("version", 2),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_wrong_values_in_a_tokenizer_json(key: str, value: object, tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    one_sentence(lambda: HuggingFaceTokenizer(tmp_path), str(path))


def test_a_prefix_that_merges_do_not_have(tmp_path: Path) -> None:
    """Files for which tokenizers 0.23 aborts the process."""
    path = write_tokenizer_json(tmp_path)
    content = json.loads(path.read_text())
    content["model"]["continuing_subword_prefix"] = "x"
    path.write_text(json.dumps(content))
    one_sentence(lambda: HuggingFaceTokenizer(tmp_path), str(path), "continuing_subword_prefix='x'")


@pytest.mark.parametrize("name", [CONFIG, NAMES, ENDS])
@pytest.mark.parametrize("content", ["", "{", "null", "[]", "1", "[" * 100_000])
def test_damaged_files_beside(content: str, name: str, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / name).write_text(content)
    one_sentence(lambda: HuggingFaceTokenizer(tmp_path), str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        *(
            (name, key, value)
            for name in (CONFIG, NAMES)
            for key in ("bos_token", "eos_token")
            for value in (1, [], {})
        ),
        (CONFIG, "pad_token", {"content": 1}),
        *((ENDS, "eos_token_id", value) for value in ("x", 1.5, -1, True, {}, ["x"], [1, None])),
    ],
)
def test_wrong_values_beside(name: str, key: str, value: object, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / name).write_text(json.dumps({key: value}))
    one_sentence(lambda: HuggingFaceTokenizer(tmp_path), str(tmp_path / name), key)


@pytest.mark.parametrize("value", [1, True, [1], ["x"], [{}], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_wrong_chat_templates(value: object, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / CONFIG).write_text(json.dumps({"chat_template": value}))
    tokenizer = HuggingFaceTokenizer(tmp_path)
    one_sentence(lambda: chat_template_of(tokenizer), str(tmp_path / CONFIG), "chat_template")


@pytest.mark.parametrize("text", [b"\xff", b"{% if %}", b"{{"])
def test_damaged_files_of_chat_templates(text: bytes, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(text)
    tokenizer = HuggingFaceTokenizer(tmp_path)
    one_sentence(lambda: chat_template_of(tokenizer), "chat")


@pytest.mark.parametrize(
    "text", ["{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ raise_exception('no') }}", "{{ 1 + '' }}"]
)
def test_templates_that_fail(text: str, tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(text)
    template = chat_template_of(HuggingFaceTokenizer(tmp_path))
    with pytest.raises(DataError, match=r"the chat template (refuses these messages|fails with ZeroDivisionError)"):
        template.render([{"role": "user", "content": "x"}])


def test_damaged_sentencepiece_models(tmp_path: Path) -> None:
    path = write_sentence_piece(tmp_path)
    data = path.read_bytes()
    for content in (b"", b"x", data[:100], data[:-1], data[:20] + b"\xb8" * 8 + data[28:]):
        path.write_bytes(content)
        one_sentence(lambda: SentencePieceTokenizer(path), str(path))
