"""The first hour: size of the model, conversations, and the whole program at its smallest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.first_hour import (
    LAYERS,
    LAYOUTS,
    ROLES,
    TEMPLATE,
    TOKENS_PER_PARAMETER,
    hidden_size_for,
    library_conversations,
)
from megatron_core.features.conversations.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]


def test_the_width_uses_the_time() -> None:
    """6 N D FLOPs of the chosen model are those of the time, up to the rounding of its width to multiples of 64."""
    for seconds, rate in ((60, 5e10), (3600, 1e11), (36000, 1e12)):
        width = hidden_size_for(seconds, rate)
        below, above = ((12 * LAYERS * (width + d) ** 2) ** 2 * 6 * TOKENS_PER_PARAMETER for d in (-32, 32))
        assert width % 64 == 0 and below <= seconds * rate <= above, width
    assert hidden_size_for(1, 1e9) == 64


def test_conversations_of_the_standard_library() -> None:
    talks = [each["messages"] for each in library_conversations()]
    texts = {messages[0]["content"]: messages[1]["content"] for messages in talks}  # type: ignore[index]
    assert len(texts) > 3000 and len(texts) == len(talks)
    assert texts["How do I call textwrap.dedent?"] == "textwrap.dedent(text)"
    assert texts["What does textwrap.dedent do?"].startswith("Remove any common leading whitespace from every line")


def test_the_template_marks_answers() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = ChatTemplate(TEMPLATE, {}).render(messages)
    assert text == "<|user|>a<|assistant|>b<|endoftext|><|user|>c<|assistant|>" and "<|user|>" in ROLES


@pytest.mark.whole_matrix
def test_the_whole_program(tmp_path: Path) -> None:
    flags = ["--minutes", "0.2", "--corpus", "docs", "--output", str(tmp_path / "hour")]
    output = subprocess.run(
        [sys.executable, "examples/first_hour.py", *flags], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    card = (tmp_path / "hour" / "card.md").read_text()
    losses = [float(value) for value in re.findall(r"\| Validation loss[^|]*\| ([\d.]+) \|", card)]
    assert len(losses) == 3 and losses[2] < losses[1] and card.count("holds") == 4
    assert "price    about 0 minutes" in output and "tools/serve.py" in output
    steps = [json.loads(line) for line in (tmp_path / "hour" / "pretrained" / "metrics.jsonl").read_text().splitlines()]
    assert {each["layout"] for each in steps if each["kind"] == "step"} == set(LAYOUTS)
