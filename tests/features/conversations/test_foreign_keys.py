"""Keys of OpenAI, ShareGPT, axolotl, LLaMA-Factory, ms-swift and trl: obeyed as there, noted, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_core.config import DataConfig
from megatron_core.datasets.build import Splits
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.conversations.chat_template import ChatTemplate, chat_template_of
from megatron_core.features.conversations.encoder import ConversationTokenizer
from megatron_core.features.conversations.schemas import messages_of
from megatron_core.features.conversations.tool_calls import tools_of
from megatron_core.features.preferences.dataset import PreferenceFile
from megatron_core.tokenizers import tokenizer_of
from megatron_core.tokenizers.companions import files_to_store
from megatron_core.vocabularies.hugging_face import HuggingFaceTokenizer
from tests.datasets.files import splits_of
from tests.vocabularies.corpus import write_tokenizer_json

ASK, ANSWER = {"role": "user", "content": "the hat"}, {"role": "assistant", "content": "cat"}
TALK = [ASK, ANSWER, {"role": "user", "content": "two"}, {"role": "assistant", "content": "and x"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.reasoning_content + '\n' if m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ CALL }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}{{ '<think>' if enable_thinking }}"
)
TEMPLATE = CHATML.replace("CALL", "call.function | tojson")
BYTES = {"tokenizer_type": "ByteLevelTokenizer"}


def _splits(folder: Path, *lines: dict[str, Any], template: str = TEMPLATE, **flags: Any) -> Splits:
    (folder / "chat.jinja").write_text(template)
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"chat_template": str(folder / "chat.jinja"), "train_data_path": (str(folder / "lines.jsonl"),)}
    return splits_of(**{**BYTES, "sft": True, "seq_length": 400, **files, **flags})


def _learned(folder: Path, line: dict[str, Any]) -> str:
    sample = _splits(folder, line).train[0]
    labels = sample["labels"][sample["loss_mask"] == 1]
    return tokenizer_of(DataConfig(**BYTES)).detokenize(labels.tolist())


@pytest.mark.parametrize(
    "flag",
    [
        *({key: 0} for key in ("weight", "loss_weight", "loss_scale", "loss_mask")),
        *({key: False} for key in ("train", "training", "trainable", "loss")),
        {"masked": True},
        {"loss_weight": 0.0, "weight": 0},
    ],
)
def test_flags_exclude_a_message(flag: dict[str, Any], tmp_path: Path) -> None:
    """In all lists of messages; the opposite values, and null, include it."""
    flags = {key: not value for key, value in flag.items()}
    for given, learned in ((flag, "and x<|im_end|>"), (flags, "cat<|im_end|>and x<|im_end|>")):
        parts = [{"type": "text", "text": "ca"} | given, {"type": "text", "text": "t"} | given]
        for message in (ANSWER | given, ANSWER | {"content": parts}):
            assert _learned(tmp_path, {"messages": [ASK, message, *TALK[2:]]}) == learned
        turns = [{"from": message["role"], "value": message["content"]} for message in TALK]
        assert _learned(tmp_path, {"conversations": [turns[0], turns[1] | given, *turns[2:]]}) == learned
        assert _learned(tmp_path, {"conversations": [ASK, ANSWER | given, *TALK[2:]]}) == learned
        assert _learned(tmp_path, {"prompt": TALK[:1], "completion": [ANSWER | given, *TALK[2:]]}) == learned
    assert _learned(tmp_path, {"prompt": [ASK, ANSWER | flags, TALK[2]], "completion": TALK[3:]}) == "and x<|im_end|>"


ROLES = [("human", "gpt"), ("user", "model"), ("User", "Assistant"), ("human", "chatgpt"), ("user", "bot")]


@pytest.mark.parametrize(("user", "assistant"), ROLES)
def test_other_names_of_roles(user: str, assistant: str, tmp_path: Path) -> None:
    """A message of the role model would otherwise not be learned, without an error if other lines have answers."""
    talk = [ASK | {"role": user}, ANSWER | {"role": assistant}]
    assert messages_of({"messages": talk}) == TALK[:2]
    assert messages_of({"conversations": [{"from": user, "value": "the hat"}, {"from": assistant, "value": "cat"}]})
    assert _learned(tmp_path, {"messages": talk}) == "cat<|im_end|>"


REFUSED = [
    ({"messages": [ASK, ANSWER | {"train": 0.5}]}, "train=0.5 must be 0, 1, true or false"),
    ({"messages": [ASK, ANSWER | {"loss": "false"}]}, 'loss="false" must be 0, 1'),
    ({"messages": [ASK, ANSWER | {"loss_scale": 2.0}]}, "loss_scale=2.0 must be"),
    ({"messages": [ASK, ANSWER | {"train": True, "weight": 0}]}, "weight=0 and train=true of one message contradict"),
    ({"messages": [ASK | {"train": True}, ANSWER]}, "train=true asks for a loss on a message of the role .user"),
    ({"messages": [ASK | {"masked": False}, ANSWER]}, "masked=false asks for a loss"),
    ({"messages": [ASK, ANSWER | {"train_detail": [{"begin_offset": 0}]}]}, "train_detail=.* as a whole or not"),
    ({"conversations": [{"from": "gpt", "value": "a", "train_detail": []}]}, r"train_detail=\[\] on a message"),
    ({"messages": [ASK, {"role": "assistant", "content": [{"text": "a", "train": False}, {"text": "b"}]}]}, "parts of"),
    ({"messages": [ASK, {"role": "tool_call", "content": "{}"}]}, "role='tool_call' is the text of a call"),
    ({"messages": TALK, "images": ["a.png"]}, r'images=\["a.png"\]: only text is supported'),
    ({"messages": TALK, "label": False}, "label=false marks a bad answer"),
    ({"instruction": "a", "output": "b", "kto_tag": False}, "kto_tag=false marks a bad answer"),
    ({"messages": TALK, "labels": [1, 2]}, "labels has a value for each token"),
    ({"messages": TALK, "weight": 0.5}, "weight=0.5 on a line is not supported"),
    ({"conversations": [], "mask": "Assistant"}, 'mask="Assistant" on a line is not supported'),
    ({"messages": TALK, "enable_thinking": True}, 'write it as "chat_template_kwargs": {"enable_thinking": true}'),
    ({"messages": TALK, "chat_template_kwargs": {"tools": []}}, "has tools, a parameter of apply_chat_template"),
    ({"messages": TALK, "chat_template_kwargs": "x"}, "must be an object with variables"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "are preferences, for --dpo"),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_keys_whose_meaning_would_be_lost(line: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        _splits(tmp_path, line)


def test_values_without_effect_are_accepted(tmp_path: Path) -> None:
    """Files that were written from tables have all keys in all lines."""
    nothing = {"images": [], "videos": None, "label": True, "weight": 1.0, "enable_thinking": None, "mask": "User"}
    assert _learned(tmp_path, {"messages": TALK, **nothing}) == "cat<|im_end|>and x<|im_end|>"
    assert _learned(tmp_path, {"messages": [ASK | {"loss": True, "weight": 1}, ANSWER]}) == "cat<|im_end|>"


def test_ignored_keys_are_named_once(tmp_path: Path) -> None:
    talk = [ASK | {"name": "Ann", "audio": None}, ANSWER | {"refusal": "no"}, {"role": "critic", "content": "c"}]
    lines = [{"messages": talk, "rejected": "x", "id": n} for n in range(3)]
    question = {"prompt": "Sum?", "context": "1 2", "completion": "3", "channel": "a", "system": "s"}
    completion = {"prompt": TALK[:1], "completion": TALK[1:]}
    notes = _splits(tmp_path, *lines, question, completion).notes
    (keys,) = (note for note in notes if note.startswith("keys without effect"))
    assert "of 5 that were read: " in keys
    listed = keys.partition("read: ")[2].split(", ")
    expected = ["rejected (3)", "id (3)", "name of messages (3)", "refusal of messages (3)", "channel (1)"]
    assert sorted(listed) == sorted(expected)
    assert "messages of these roles are not learned (lines of 5 that were read): 'critic' (3)" in notes
    for words in ("joined by an empty line", "are texts of a chat", "of a completion are learned (trl: all) (1 of 5"):
        assert sum(words in note for note in notes) == 1
    names = _splits(tmp_path, *lines, template=TEMPLATE + "{{ messages[0].name }}").notes
    assert not any("name of messages" in note for note in names)


def _of_transformers(folder: Path, template: str) -> tuple[Any, ConversationTokenizer]:
    path = write_tokenizer_json(folder, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path), chat_template=template)
    return theirs, ConversationTokenizer(HuggingFaceTokenizer(path), ChatTemplate(template, {}))


def test_variables_of_a_line_are_those_of_transformers(tmp_path: Path) -> None:
    """trl and ms-swift pass chat_template_kwargs to apply_chat_template."""
    theirs, encoder = _of_transformers(tmp_path, TEMPLATE)
    for variables in ({"enable_thinking": True}, {"enable_thinking": False}, {}):
        expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True, **variables)["input_ids"]
        assert encoder.encode(TALK, None, variables)[0] == expected
    lines = [{"messages": TALK, "chat_template_kwargs": {"enable_thinking": True}}, {"messages": TALK}]
    texts = [
        tokenizer_of(DataConfig(**BYTES)).detokenize(sample["tokens"].tolist())
        for sample in map(_splits(tmp_path, *lines).train.__getitem__, range(2))
    ]
    assert sorted("<think>" in text for text in texts) == [False, True]


ARGUMENTS = {"city": 'Par"is', "days": 2}
CALL = {"type": "function", "function": {"name": "rain", "arguments": ARGUMENTS}}


@pytest.mark.parametrize(
    ("written", "takes_text"),
    [("call.function | tojson", False), ("call.function.arguments | tojson", False), ("call.function.arguments", True),
     ("'<' + call.function.arguments + '>'", True), ("call.function.arguments.city", False)],
)  # fmt: skip
@pytest.mark.parametrize("given", ["object", "text", "function_call"])
def test_arguments_of_calls_are_encoded_once(written: str, takes_text: bool, given: str, tmp_path: Path) -> None:
    """OpenAI gives arguments as JSON text; transformers, and most templates, expect objects, and some expect texts."""
    theirs, encoder = _of_transformers(tmp_path, CHATML.replace("CALL", written))
    text = json.dumps(ARGUMENTS)
    as_text = CALL | {"function": CALL["function"] | {"arguments": text}}
    calls = {"tool_calls": [CALL if given == "object" else as_text]}
    if given == "function_call":
        calls = {"function_call": {"name": "rain", "arguments": text}}
    messages = messages_of({"messages": [ASK, {"role": "assistant", "content": "", **calls}]})
    expected = [ASK, {"role": "assistant", "content": "", "tool_calls": [as_text if takes_text else CALL]}]
    ids = theirs.apply_chat_template(expected, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert encoder.encode(messages) == (ids["input_ids"], [bool(each) for each in ids["assistant_masks"]])


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for arguments, message in (("{x", "is a string that is not JSON"), ("[1]", "is the JSON text of a list")):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        with pytest.raises(DataError, match=f"line 1: arguments {message}"):
            _splits(tmp_path, {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})


def test_older_and_encoded_forms_of_tools() -> None:
    """OpenAI's functions; axolotl reads parameters that are JSON texts."""
    function = {"name": "rain", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    encoded = [{"type": "function", "function": function | {"parameters": json.dumps(function["parameters"])}}]
    assert tools_of({"functions": [function]}) == tools_of({"tools": encoded}) == tools_of({"tools": tools}) == tools


DROPS = TEMPLATE.replace("m.reasoning_content + '\n' if m.reasoning_content", "''")
AFTER = DROPS.replace("{{ m.content }}{% for", "{{ m.content.split('</think>')[-1] }}{% for")


@pytest.mark.parametrize(
    ("message", "template", "lost"),
    [
        *(({key: "so it is"}, TEMPLATE, None) for key in ("reasoning_content", "reasoning", "thinking")),
        *(({key: "so it is"}, DROPS, "reasoning") for key in ("reasoning_content", "reasoning", "thinking")),
        ({"content": "<think>\nso it is\n</think>\n\ncat"}, TEMPLATE, None),
        ({"content": "<think>\nso it is\n</think>\n\ncat"}, AFTER, "reasoning"),
        ({"content": "cat"}, TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }}"), "the text"),
        ({"content": "cat", "tool_calls": [CALL]}, TEMPLATE.replace("m.tool_calls", "[]"), "the calls"),
        ({"content": "cat", "tool_calls": [CALL]}, TEMPLATE, None),
    ],
)
def test_parts_that_the_template_leaves_out_are_noted(
    message: dict[str, Any], template: str, lost: str | None, tmp_path: Path
) -> None:
    """transformers gives reasoning under all names that templates read."""
    talk = [ASK, ANSWER | message]
    notes = [note for note in _splits(tmp_path, {"messages": talk}, template=template).notes if "leaves out" in note]
    assert len(notes) == (lost is not None) and all(lost in note and "1 of 1 answers" in note for note in notes)
    theirs, encoder = _of_transformers(tmp_path, template)
    expected = theirs.apply_chat_template(talk, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert encoder.encode(talk) == (expected["input_ids"], [bool(each) for each in expected["assistant_masks"]])


def test_a_base_model_learns_lines_of_alpaca(tmp_path: Path) -> None:
    """The texts are those of LLaMA-Factory's template alpaca, up to the line break before the context; the error for a
    tokenizer without a template names this way."""
    path = write_tokenizer_json(tmp_path, ("<|endoftext|>",))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    line = {"instruction": "Sum?", "input": "1 2", "output": "3", "history": [["1 + 1?", "2"]]}
    model = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(path)}
    with pytest.raises(ConfigError, match=r"also questions and answers with Alpaca's keys\..* --chat-template alpaca"):
        _splits(tmp_path, line, **model, chat_template=None)
    splits = _splits(tmp_path, line, **model, chat_template="alpaca")
    sample, tokenizer = splits.train[0], HuggingFaceTokenizer(path)
    length = sample["document_lengths"][0]
    assert tokenizer.detokenize(sample["tokens"][:length].tolist()) == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n1 + 1?\n\n### Response:\n2<|endoftext|>\n\n"
        "### Instruction:\nSum?\n\n1 2\n\n### Response:\n3<|endoftext|>\n\n"
    )
    learned = tokenizer.detokenize(sample["labels"][sample["loss_mask"] == 1].tolist())
    assert learned == "2<|endoftext|>3<|endoftext|>"
    assert not any("no end" in note for note in splits.notes)
    stored = files_to_store(tokenizer, "alpaca")["tokenizer/chat_template.jinja"]
    prompt = chat_template_of(tokenizer, str(stored)).render([{"role": "system", "content": "S"}, ASK])
    assert prompt == "S\n\n### Instruction:\nthe hat\n\n### Response:\n"
    with pytest.raises(DataError, match="template alpaca has no messages of the role tool"):
        _splits(
            tmp_path, {"messages": [ASK, {"role": "tool", "content": "x"}, ANSWER]}, **model, chat_template="alpaca"
        )


def test_preferences_have_their_question(tmp_path: Path) -> None:
    """Columns of LLaMA-Factory; and as in trl, whole conversations have their own question."""
    path = tmp_path / "pairs.jsonl"
    question = {"role": "user", "content": "Sum?\n\n1 2"}
    answers = [{"role": "assistant", "content": text} for text in ("3", "4")]
    sides = {"chosen": "3", "rejected": "4"}
    whole = {side: [question, answer] for side, answer in zip(("chosen", "rejected"), answers, strict=True)}
    system = {"role": "system", "content": "Add."}
    for line, before in (
        ({"instruction": "Sum?", "input": "1 2", **sides}, [question]),
        ({"prompt": "Sum?\n\n1 2", "system": "Add.", **sides}, [system, question]),
        ({"prompt": "Sum?\n\n1 2", **whole}, [question]),
        ({**whole, "system": "Add."}, [system, question]),
    ):
        path.write_text(json.dumps(line))
        assert PreferenceFile(str(path))[0].conversations == [[*before, answer] for answer in answers]
    for line, message in (
        ({"messages": [question], **sides}, "messages next to chosen and rejected is not read"),
        ({**whole, "images": ["x"]}, "only text is supported"),
        (
            {"prompt": "a", "chosen": [answers[0] | {"weight": 0}], "rejected": "4"},
            "of chosen is excluded",
        ),
    ):
        path.write_text(json.dumps(line))
        with pytest.raises(DataError, match=message):
            PreferenceFile(str(path))[0]
    notes = _splits(tmp_path, {"prompt": "a", **sides, "margin": 1}, sft=False, dpo=True).notes
    assert notes == ("keys without effect, with the number of lines of 1 that were read: margin (1)",)
