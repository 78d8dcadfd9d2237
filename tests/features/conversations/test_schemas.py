"""Lines of instruction data as messages, and a data set of lines with different schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.training.datasets import varlen_dataset
from megatron_core.errors import DataError
from megatron_core.features.conversations.dataset import ConversationFile
from megatron_core.features.conversations.schemas import messages_of, schema_of

ASKED = [{"role": "user", "content": "Sum?\n\n1 2"}, {"role": "assistant", "content": "3"}]
LINES = {
    "alpaca": {"instruction": "Sum?", "input": "1 2", "output": "3"},
    "dolly": {"instruction": "Sum?", "context": "1 2", "response": "3", "category": "x"},
    "openai": {"messages": ASKED, "instruction": "no", "output": "no"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Sum?\n\n1 2"}, {"from": "gpt", "value": "3"}]},
}


@pytest.mark.parametrize("name", LINES)
def test_every_schema_gives_the_same_messages(name: str) -> None:
    assert messages_of(LINES[name]) == ASKED


def test_system_history_and_speakers_of_other_spellings() -> None:
    """The columns that LLaMA-Factory has besides Alpaca's and ShareGPT's."""
    system = {"role": "system", "content": "Add."}
    earlier = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    assert messages_of({**LINES["alpaca"], "system": "Add.", "history": [["1 + 1?", "2"]]}) == [
        system, *earlier, *ASKED
    ]  # fmt: skip
    assert messages_of({**LINES["dolly"], "system_prompt": "Add."}) == [system, *ASKED]
    turns = [{"from": "Human", "value": "Sum?\n\n1 2"}, {"from": "GPT", "value": "3"}]
    assert messages_of({"conversations": turns, "system": "Add."}) == [system, *ASKED]
    own = {"from": "system", "value": "Other."}
    assert messages_of({"conversations": [own, *turns], "system": "Add."})[0]["content"] == "Other."
    assert messages_of({"instruction": "a", "output": None, "response": "b"})[1]["content"] == "b"


def test_tools_may_be_a_text(tmp_path: Path) -> None:
    path, tools = tmp_path / "lines.jsonl", [{"type": "function", "function": {"name": "f"}}]
    given = [tools, json.dumps(tools), "", None, []]
    path.write_text("\n".join(json.dumps({"messages": ASKED, "tools": each}) for each in given))
    assert [ConversationFile(str(path))[line].tools for line in range(5)] == [tools, tools, None, None, []]


def test_a_file_may_have_lines_of_several_schemas(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES.values())))
    assert [ConversationFile(str(path))[line][:2] for line in range(len(LINES))] == [([ASKED], None)] * len(LINES)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"foo": 1}, "cannot infer the schema of the columns foo"),
        ({"instruction": "a", "category": "b"}, "cannot infer the schema"),
        ({"instruction": ["a"], "output": "b"}, "instruction.* must be a string"),
        ({"conversations": [{"from": "human", "value": [1]}]}, "value must be a string, not of type list"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "from='function_call' is not a known speaker"),
        ({"instruction": "a", "output": None, "answer": None}, "output and answer is null, so there is no answer"),
        ({"instruction": "a", "output": "b", "history": [["c"]]}, "history must be a list of pairs"),
        ({"messages": ASKED, "tools": "search"}, "tools is a string that is not JSON"),
        ({"messages": ASKED, "tools": {"name": "f"}}, "tools must be a list of objects"),
        ({"text": "a"}, "no answers"),
    ],
)
def test_what_is_not_one_of_them(line: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(DataError, match=message):
        ConversationFile(str(path))[0]
    assert ConversationFile(str(path)).place(0) == f"{path}, line 1"


def test_megatrons_names_begin_with_the_system() -> None:
    converter, name = varlen_dataset._select_converter(["messages", "text"])
    assert name == schema_of(["messages"]) == "openai-messages"
    assert converter(LINES["openai"]) == [{"role": "system", "content": ""}, *ASKED]
    assert varlen_dataset._select_converter(["text"])[0]({"text": "a"}) == "a"
    assert varlen_dataset._looks_like_hf_id("owner/name")
    assert not varlen_dataset._looks_like_hf_id("./name")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n[\n", r"is a JSON array, .* with jq -c '\.\[\]' \S*talks.json > talks_lines.jsonl"),
        (b'\xef\xbb\xbf[{"messages": []}]', "is a JSON array"),
        (b"PAR1\x15\x04", r"is a Parquet file, .* pandas\.read_parquet"),
        (b"\x1f\x8b\x08\x00", "is compressed, .* gzip -dc"),
    ],
)
def test_other_formats_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "talks.json").write_bytes(content)
    with pytest.raises(DataError, match=message):
        ConversationFile(str(tmp_path / "talks.json"))
