"""The token that ends an answer is learned, or a note says that there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_core.features.conversations.chat_template import ChatTemplate
from megatron_core.features.conversations.encoder import ConversationTokenizer
from megatron_core.tokenizers import end_ids
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from tests.datasets.files import splits_of
from tests.vocabularies.corpus import write_tokenizer_json

TALK = [
    {"role": "user", "content": "the hat"},
    {"role": "assistant", "content": "the cat"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "x"},
]
HEADINGS = "<|user|>", "<|assistant|>", "<|endoftext|>", "<|im_end|>"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}" + PROMPT
GLM_MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
OUTSIDE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}AFTER<|im_end|>\n{% endfor %}"
)
LINES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '\\n' }}{% endfor %}" + PROMPT.replace(
    "<|assistant|>", "[assistant]"
)


def _files(folder: Path, ends: object) -> Path:
    write_tokenizer_json(folder, HEADINGS)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    if ends is not None:
        ids = HuggingFaceTokenizer(folder).tokenize
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids(end)[0] for end in ends]}))
    return folder


def _learned(tokenizer: HuggingFaceTokenizer, template: str, talk: list[dict[str, Any]]) -> tuple[list[int], str]:
    ids, counted = ConversationTokenizer(tokenizer, ChatTemplate(template, {})).encode(talk)
    return ids, tokenizer.detokenize([token for token, is_answer in zip(ids, counted, strict=True) if is_answer])


def _of_transformers(tokenizer: HuggingFaceTokenizer, template: str, talk: list[dict[str, Any]]) -> list[int]:
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer.files()[0]), chat_template=template)
    return theirs.apply_chat_template(talk, tokenize=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("template", [GLM, GLM_MARKED])
def test_the_next_heading_is_the_end_of_an_answer(template: str, tmp_path: Path) -> None:
    """Generation stops at the heading of the user. Nothing follows the last answer, so an end is added."""
    tokenizer = HuggingFaceTokenizer(_files(tmp_path, ["<|endoftext|>", "<|user|>"]))
    ids, learned = _learned(tokenizer, template, TALK)
    newline = "\n" if template == GLM else ""
    assert learned == f"{newline}the cat<|user|>{newline}x<|endoftext|>"
    assert ids == [*_of_transformers(tokenizer, template, TALK), tokenizer.eos]
    ids, learned = _learned(tokenizer, template, [*TALK[:3], TALK[3] | {"weight": 0}])
    assert learned == f"{newline}the cat<|user|>" and ids == _of_transformers(tokenizer, template, TALK)
    other = HuggingFaceTokenizer(_files(tmp_path, ["<|user|>"]))
    assert _learned(other, template, TALK[:2])[1] == f"{newline}the cat<|user|>", "eos is not in the list"


@pytest.mark.parametrize("between", ["", "\n", " \n"])
def test_an_end_after_the_marks_is_learned_with_the_space_before_it(between: str, tmp_path: Path) -> None:
    """Also axolotl learns the end of a turn that is learned (train_on_eos)."""
    tokenizer = HuggingFaceTokenizer(_files(tmp_path, None))
    template = OUTSIDE.replace("AFTER", f"{{{{ {between!r} }}}}")
    ids, learned = _learned(tokenizer, template, TALK)
    assert learned == f"the cat{between}<|im_end|>x{between}<|im_end|>"
    assert ids == _of_transformers(tokenizer, template, TALK)
    assert _learned(tokenizer, OUTSIDE.replace("AFTER", "text"), TALK)[1] == "the catx"


@pytest.mark.parametrize(
    ("template", "ends", "messages"),
    [
        (LINES, None, [r"2 of 2 answers in 1 lines .* have no end: .* eos_token .* generation_config\.json"]),
        (LINES, ["<|user|>"], ["writes no end after last answers, so '<|user|>' of", "1 of 2 answers"]),
        (GLM, ["<|user|>"], ["writes no end after last answers"]),
        (OUTSIDE.replace("AFTER", ""), None, []),
    ],
)
def test_answers_without_an_end_are_noted(template: str, ends: object, messages: list[str], tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALK}))
    files = {"tokenizer_model": str(_files(tmp_path, ends)), "train_data_path": (str(tmp_path / "talks.jsonl"),)}
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "sft": True, "chat_template": str(tmp_path / "chat.jinja")}
    splits = splits_of(HuggingFaceTokenizer(tmp_path), **flags, **files)
    notes = [note for note in splits.notes if " end" in note]
    assert len(notes) == len(messages)
    for note, message in zip(notes, messages, strict=True):
        assert re.search(message.replace("|", r"\|"), note)
    learned = splits.train[0]["labels"][splits.train[0]["loss_mask"] == 1].tolist()
    is_noted = any("have no end" in note for note in notes)
    assert (learned[-1] in end_ids(HuggingFaceTokenizer(tmp_path))) != (is_noted and ends is None)
