"""The first hour: size of the model, conversations, remaining time, failures, and the whole command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from megatron_core.commands.collect_corpus import library_conversations
from megatron_core.commands.first_hour import (
    LAYERS,
    LAYOUTS,
    ROLES,
    TEMPLATE,
    TOKENS_PER_PARAMETER,
    FirstHour,
    FirstHourFlags,
    HourPlan,
    first_hour,
    hidden_size_for,
    training_seconds,
)
from megatron_core.commands.start_steps import TimedSteps
from megatron_core.errors import ConfigError, DataError, MegatronError
from megatron_core.features.conversations.chat_template import ChatTemplate


def test_the_width_uses_the_time() -> None:
    """6 N D FLOPs of the chosen model are those of the time, up to the rounding of its width to multiples of 64."""
    for seconds, rate in ((60, 5e10), (3600, 1e11), (36000, 1e12)):
        width = hidden_size_for(seconds, rate)
        below, above = ((12 * LAYERS * (width + d) ** 2) ** 2 * 6 * TOKENS_PER_PARAMETER for d in (-32, 32))
        assert width % 64 == 0 and below <= seconds * rate <= above, width
    assert hidden_size_for(1, 1e9) == 64


@pytest.mark.parametrize("minutes", [3, 10, 60])
def test_all_steps_take_the_time(minutes: float) -> None:
    """The shares of training leave at most a fifth of the time for slower layouts and evaluation."""
    seconds = training_seconds(minutes)
    expected = sum(HourPlan(64, int(0.65 * seconds), int(0.15 * seconds), 1.0).seconds().values())
    assert 0.78 * 60 * minutes < expected <= 60 * minutes


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


def test_a_step_that_fails_ends_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the last lines of its output; before it, the remaining time is printed."""
    steps = TimedSteps(tmp_path / "log.txt")
    steps.plan({"text": 20.0, "tokens": 100.0})
    with pytest.raises(MegatronError, match=r"(?s)the step 'text' failed with status 1; .*nowhere is not a folder"):
        steps.run("text", "collect_corpus", "--folder", "nowhere", "--output", tmp_path / "corpus.jsonl")
    assert capsys.readouterr().out.split() == ["[1/2]", "text", "about", "2", "min", "left"]
    assert "$ megatron-collect-corpus --folder nowhere" in (tmp_path / "log.txt").read_text()


def test_the_server_is_needed_before_the_first_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the chat page needs starlette .*: pip install starlette .* --no-serve"):
        first_hour(FirstHourFlags(output=str(tmp_path / "hour")))
    assert not (tmp_path / "hour").exists()


def test_a_corpus_without_validation_ends_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("one document")
    hour = FirstHour(FirstHourFlags(corpus=str(tmp_path / "notes"), output=str(tmp_path / "hour")))
    with pytest.raises(DataError, match="--corpus has 1 documents; give 20 files or more"):
        hour.prepare_data()


def has_ended(group: int, seconds: float) -> bool:
    """Whether all processes of a group end in this time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_a_terminated_command_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_core.commands.first_hour", "--minutes", "1", "--no-serve"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("measuring a step")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
        assert has_ended(process.pid, seconds=60)
    finally:
        process.kill()
        process.stdout.close()


@pytest.mark.whole_matrix
def test_the_whole_command(tmp_path: Path) -> None:
    """In an empty folder, without a terminal, to a chat that answers; Ctrl-C ends it."""
    (tmp_path / "notes").mkdir()
    for number in range(40):
        (tmp_path / "notes" / f"{number}.txt").write_text("the cat sat on the mat. " * 100)
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "megatron_core.commands.first_hour", "--minutes", "0.2", "--vocab-size", "300"]
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    process = subprocess.Popen(
        [*command, "--corpus", "../notes"], cwd=tmp_path / "empty", env=environment, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    output = []
    try:
        for line in process.stdout:
            output.append(line)
            if address := re.search(r"chat with it at (\S+)", line):
                with urllib.request.urlopen(address[1]) as page:
                    assert b"chat.js" in page.read()
                break
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    text = "".join(output)
    assert "[11/11] curve" in text and re.search(r"on one H100 +\d+ s for these steps", text)
    assert "\nanswer    " in text
    folder = tmp_path / "empty" / "first_hour"
    card = (folder / "card.md").read_text()
    losses = [float(value) for value in re.findall(r"\| Validation loss[^|]*\| ([\d.]+) \|", card)]
    assert len(losses) == 3 and losses[2] < losses[1] and card.count("holds") == 4
    steps = [json.loads(line) for line in (folder / "pretrained" / "metrics.jsonl").read_text().splitlines()]
    assert {each["layout"] for each in steps if each["kind"] == "step"} == set(LAYOUTS)
