"""No command waits for a named pipe that has the name of one of its inputs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.programs import run_program

PIPES = (
    "pipe", "hf/config.json", "ds/latest", "megatron/latest_checkpointed_iteration.txt",
    "megatron/iter_0000002/.metadata", "native/iter_0000002/manifest.json", "run/metrics.jsonl",
    "ds2/global_step1/mp_rank_00_model_states.pt", "hf2/model.safetensors",
    "rank/iter_0000002/mp_rank_00/model_optim_rng.pt",
    "adapter/adapter_config.json", "texts/a.txt", "tokens.idx",
)  # fmt: skip
COMMANDS = """
report run --out r.html
report pipe --out r.html
diagnose run
plot_metrics pipe --out a.png
inspect_checkpoint native
inspect_checkpoint pipe
convert_checkpoint --from hf --to native --load hf --save out
convert_checkpoint --from hf --to native --load hf2 --save out --no-verify
convert_checkpoint --from deepspeed --to native --load ds --save out
convert_checkpoint --from deepspeed --to native --load ds2 --save out
convert_checkpoint --from deepspeed --to hf --load ds2 --save out --hf-config hf
convert_checkpoint --from megatron --to native --load megatron --save out
convert_checkpoint --from megatron --to native --load rank --save out
convert_checkpoint --from native --to hf --load native --save out
deepspeed_config --from-json pipe
deepspeed_config --from-yaml pipe
plan_layout --config pipe --gpus 2
compare_hashes pipe pipe
train_tokenizer --input pipe --vocab-size 300 --output t.json
inspect_dataset tokens
corpus_report --input tokens --output report.json
merge_datasets --input tokens --output-prefix out
preprocess_data --input pipe --output-prefix out --tokenizer-type ByteLevelTokenizer
preprocess_data --input ds2/latest --output-prefix out --tokenizer-type HuggingFaceTokenizer --tokenizer-model pipe
show_schedule --plan pipe
show_schedule --measured run
from_megatron pipe
generate_text --load hf --prompt a
verify_layout --layouts tp2 --config pipe
""".strip().splitlines()


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End a command that waits."""

    def stop(number: int, frame: FrameType | None) -> None:
        pytest.fail("it waits for a named pipe")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in PIPES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name)
    (tmp_path / "hf2" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "ds2" / "latest").write_text("global_step1")
    (tmp_path / "rank" / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "tokens.bin").write_bytes(b"")
    return tmp_path


@pytest.mark.every_case
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_does_not_wait_for_a_named_pipe(command: str, place: Path) -> None:
    tool, *flags = command.split()
    result = run_program(f"tools/{tool}.py", *flags, cwd=place)
    assert result.returncode and result.stderr, result.stdout
    assert not (place / "out").exists()
