"""Small files given by users: settings, paths, prompts, plans, templates."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_core.commands.generate_text import read_prompts
from megatron_core.config import DataConfig
from megatron_core.config.file import read_config
from megatron_core.datasets.paths import read_paths
from megatron_core.errors import MegatronError
from megatron_core.features.conversations.chat_template import chat_template_of
from megatron_core.features.pipeline_schedules.plan_file import read_plan
from megatron_core.text_file import LARGEST_TEXT, parse_yaml, read_text
from megatron_core.tokenizers import tokenizer_of

BYTES = DataConfig(tokenizer_type="ByteLevelTokenizer")
READERS = {
    "--config": read_config,
    "data_args_path": lambda path: read_paths(DataConfig(data_args_path=path)),
    "per_split_data_args_path": lambda path: read_paths(DataConfig(per_split_data_args_path=path)),
    "data_phases": lambda path: read_paths(DataConfig(data_phases=path)),
    "pipeline plan": read_plan,
    "chat_template": lambda path: chat_template_of(tokenizer_of(BYTES), path),
    "prompt_file": read_prompts,
}


@pytest.mark.parametrize("setting", READERS)
def test_what_is_no_text_is_refused_in_one_sentence(setting: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    kinds = {"pipe": "it is a named pipe", "bytes": "can't decode", "huge": f"more than {LARGEST_TEXT} bytes"}
    for name, reason in (kinds | {"absent": "No such file", ".": "Is a directory"}).items():
        with pytest.raises(MegatronError) as error:
            READERS[setting](str(tmp_path / name))
        assert str(error.value).startswith(setting)
        assert str(error.value).count("cannot be read") == 1
        assert reason in str(error.value)


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    """Editors of Windows write it; it is invisible in a message about the first word."""
    texts = {
        "--config": ("lr: 1", lambda config: config.optimizer.lr == 1.0),
        "data_args_path": ("0.5 a", lambda paths: paths.phases[0].data_path == ("0.5", "a")),
        "prompt_file": ("hello", lambda prompts: prompts[0] == "hello"),
        "chat_template": ("{{ messages }}", lambda template: str(template) != ""),
    }
    for setting, (text, holds) in texts.items():
        (tmp_path / "file.txt").write_text(text, encoding="utf-8-sig")
        assert holds(READERS[setting](str(tmp_path / "file.txt"))), setting
        assert read_text(tmp_path / "file.txt") == text


def test_what_a_command_prints_is_read(tmp_path: Path) -> None:
    code = "from megatron_core.text_file import read_text; print(read_text('/dev/stdin') == 'a' * 100_000)"
    done = subprocess.run([sys.executable, "-c", code], input="a" * 100_000, text=True, capture_output=True, check=True)
    assert done.stdout == "True\n"
    (tmp_path / "file").write_text("text\n")
    assert read_text(tmp_path / "file") == "text\n"


ALIASES = "\n".join(
    ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{KEY: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9))]
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ALIASES.replace("KEY", "<<"), "more than 200,000 values"),
        (ALIASES.replace("KEY", "y"), "more than 200,000 values"),
        ("[" + "1," * 300_000 + "]", "more than 200,000 values"),
        ("a: &a {<<: *a}", "an alias refers to a value that contains it"),
        ("[" * 100_000, "nested deeper than 100 levels"),  # libyaml overflows the stack
        ("- " * 5_000, "nested deeper than 100 levels"),
        ("a0: &a0 1\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 200)), "nested deeper than 100 levels"),
        ("lr: " + ":".join(["1"] * 1_000_000), "a number of more than 4300 characters"),  # in base 60
        ("train_iters: 010", "010 is a number in base 8"),
        ("step_batch_size_schedule: [0:4, 320:8]", "320:8 is a number in base 8 or 60"),
        ("lr: !!bool 3", "does not fit its tag"),
        ("lr: !!timestamp 3", "does not fit its tag"),
        ("lr: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_yaml_that_uses_up_time_or_memory_or_is_ambiguous_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    start = time.monotonic()
    for setting in ("--config", "data_phases"):
        with pytest.raises(MegatronError, match=reason) as error:
            READERS[setting](str(path))
        assert "\n" not in str(error.value)
    assert time.monotonic() - start < 5


def test_merged_keys_may_occur_again() -> None:
    text = "a: &a {x: 1}\nb: {c: &c {<<: *a, x: 2}}\nd: {<<: *c, y: 3}"
    assert parse_yaml(text) == yaml.safe_load(text) == {"a": {"x": 1}, "b": {"c": {"x": 2}}, "d": {"x": 2, "y": 3}}
