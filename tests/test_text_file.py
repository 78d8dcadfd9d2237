"""Small files that users name: settings, paths, prompts, plans, templates."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_core.config import DataConfig
from megatron_core.config.file import read_config
from megatron_core.datasets.paths import read_paths
from megatron_core.errors import MegatronError
from megatron_core.schedules.plan_file import read_plan
from megatron_core.text_file import LARGEST_TEXT, read_text
from megatron_core.tokenizers import tokenizer_of
from megatron_core.tokenizers.chat import chat_template_of
from tools.generate_text import read_prompts

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


def test_what_a_command_prints_is_read(tmp_path: Path) -> None:
    code = "from megatron_core.text_file import read_text; print(read_text('/dev/stdin') == 'a' * 100_000)"
    done = subprocess.run([sys.executable, "-c", code], input="a" * 100_000, text=True, capture_output=True, check=True)
    assert done.stdout == "True\n"
    (tmp_path / "file").write_text("text\n")
    assert read_text(tmp_path / "file") == "text\n"
