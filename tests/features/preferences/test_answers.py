"""The tokens of preferences that count are those of trl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_core.errors import DataError
from megatron_core.features.preferences.dataset import PreferenceDataset, PreferenceFile
from tests.features.conversations.test_dataset import CHATML, CHATML_MARKED, _of_transformers


def _turns(text: str) -> list[dict[str, str]]:
    """Messages by the user and the assistant in turn, of words after ``u:`` and ``a:``."""
    roles = {"u": "user", "a": "assistant"}
    return [{"role": roles[word[0]], "content": word[2:]} for word in text.split()]


SEVERAL = {"chosen": _turns("u:cat a:the u:hat a:two"), "rejected": _turns("u:cat a:and u:x a:lines")}
LINES = {
    "answers of one message": {"chosen": _turns("u:cat a:the"), "rejected": _turns("u:cat a:and")},
    "answers of several messages": SEVERAL,
    "after a prompt": {"prompt": SEVERAL["chosen"][:1], **{side: turns[1:] for side, turns in SEVERAL.items()}},
    "of several lengths": SEVERAL | {"rejected": _turns("u:cat a:and")},
    "after an equal answer": SEVERAL | {"rejected": _turns("u:cat a:the u:hat a:lines")},
    "the beginning of the other": SEVERAL | {"rejected": SEVERAL["chosen"][:2]},
}


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
@pytest.mark.parametrize("kind", LINES)
def test_tokens_of_answers_are_those_of_trl(kind: str, template: str, tmp_path: Path) -> None:
    """All tokens after the prompt count, which are the messages before the first difference (``extract_prompt``)."""
    theirs, encoder = _of_transformers(tmp_path, template)
    line: dict[str, Any] = LINES[kind]
    (tmp_path / "pairs.jsonl").write_text(json.dumps(line))
    data = PreferenceDataset([PreferenceFile(str(tmp_path / "pairs.jsonl"))], [0], encoder, 120, seed=1)
    sides = [[*line.get("prompt", ()), *line[side]] for side in ("chosen", "rejected")]
    lengths = [len(messages) - 1 for messages in sides]
    shared = next((n for n in range(min(lengths)) if sides[0][n] != sides[1][n]), min(lengths))
    prompt = theirs.apply_chat_template(sides[0][:shared], add_generation_prompt=True, return_dict=True)["input_ids"]
    for sample, messages in zip((data[0], data[1]), sides, strict=True):
        ids = theirs.apply_chat_template(messages, return_dict=True)["input_ids"]
        assert ids[: len(prompt)] == prompt
        np.testing.assert_array_equal(sample["tokens"][: len(ids)], ids)
        np.testing.assert_array_equal(np.flatnonzero(sample["loss_mask"]) + 1, np.arange(len(prompt), len(ids)))


def test_answers_to_different_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    for line, message in (
        ({"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c"}, "answer no message"),
        ({"chosen": _turns("a:the"), "rejected": _turns("a:cat"), "system": "x"}, "answer no message"),
        (SEVERAL | {"chosen": _turns("u:hat a:the")}, "differ from message 1 on, which in chosen has the role 'user'"),
        (SEVERAL | {"rejected": [SEVERAL["chosen"][0] | {"weight": 1}, *SEVERAL["rejected"][1:]]}, "from message 1 on"),
        (
            SEVERAL
            | {
                "rejected": [
                    *SEVERAL["chosen"][:1],
                    {"role": "assistant", "content": "x", "weight": 0},
                    *SEVERAL["chosen"][2:],
                ]
            },
            "a message of rejected is excluded from the loss",
        ),
    ):
        path.write_text(json.dumps(line))
        with pytest.raises(DataError, match=message):
            PreferenceFile(str(path))[0]
