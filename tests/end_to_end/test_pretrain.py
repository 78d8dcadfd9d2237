"""pretrain_gpt.py called like users call it: by torchrun, with valid and invalid flags."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_core.preprocess.builder import IndexedDatasetBuilder
from tests.programs import ForkedPopen, run_program, run_ranks_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = [sys.executable, "pretrain_gpt.py"]
MODEL = ["--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]
TINY = [*MODEL, "--vocab-size", "64", "--mock-data", "--global-batch-size", "8", "--lr", "1e-2", "--eval-iters", "1"]


def _pretrain(ranks: int, *flags: object) -> subprocess.CompletedProcess[str]:
    if not ranks:
        return run_program("pretrain_gpt.py", *flags)
    return run_ranks_of(shlex.join(["torchrun", "--nproc-per-node", str(ranks), "pretrain_gpt.py", *map(str, flags)]))


def _steps(folder: Path) -> dict[int, float]:
    """Loss by iteration; of a repeated iteration the last one."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["loss"] for line in lines if line["kind"] == "step"}


def test_training_goes_on_in_another_layout(tmp_path: Path) -> None:
    """Eight steps in one process, and the same eight steps in two layouts one after the other: the same losses."""
    alone, split = tmp_path / "alone", tmp_path / "split"
    schedule = [*TINY, "--fp64", "--lr-decay-iters", "8", "--train-iters"]
    assert _pretrain(0, *schedule, 8, "--save", alone).returncode == 0
    first = ["--pipeline-model-parallel-size", 2, "--pipeline-model-parallel-layout", "E|tt|tt|L"]
    result = _pretrain(2, *schedule, 5, *first, "--tensorboard-dir", tmp_path / "tensorboard", "--save", split)
    assert result.returncode == 0, result.stderr
    assert "pipeline rank 0: embedding | layers 2-3\npipeline rank 1: layers 0-1 | output\n" in result.stdout
    result = _pretrain(2, *schedule, 8, "--use-distributed-optimizer", "--save", split, "--load", split)
    assert result.returncode == 0, result.stderr
    assert "resuming from iteration 5, 40 samples" in result.stdout
    assert "layout changed from pp2 v2 to dp2 zero1" in result.stdout
    found, expected = _steps(split), _steps(alone)
    assert sorted(found) == list(range(1, 9))
    assert [found[i] for i in range(1, 9)] == pytest.approx([expected[i] for i in range(1, 9)], rel=1e-9)
    assert list((tmp_path / "tensorboard").iterdir())


def _token_files(folder: Path, largest: int) -> Path:
    prefix = folder / "text"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for document in range(30):
        builder.add_document(np.arange(40) * (document + 1) % (largest + 1), [40])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_wrong_input_is_one_clear_message(tmp_path: Path) -> None:
    """Each error has the setting, its value and the fix; nothing hangs and no traceback is shown."""
    prefix = _token_files(tmp_path, largest=63)
    truncated = tmp_path / "truncated"
    for ending in (".bin", ".idx"):
        content = prefix.with_suffix(ending).read_bytes()
        truncated.with_suffix(ending).write_bytes(content[: len(content) // 2])
    train = [*MODEL, "--train-iters", "2"]
    data = [*train, "--vocab-size", "64", "--data-path"]
    cases = {
        "num_attention_heads=4": (0, [*TINY, "--train-iters", 2, "--tensor-model-parallel-size", 3]),
        "hidden_size=33": (0, [*TINY, "--train-iters", 2, "--hidden-size", 33]),
        "nowhere.bin": (0, [*data, tmp_path / "nowhere"]),
        "truncated": (0, [*data, truncated]),
        "vocabulary of 50 tokens": (0, [*train, "--vocab-size", "50", "--data-path", prefix]),
        "--num-layers": (0, [*TINY, "--train-iters", 2, "--num-layer", 3]),
        "not supported": (0, [*TINY, "--train-iters", 2, "--fp4-format", "e2m1"]),
        "holds no checkpoint": (0, [*TINY, "--train-iters", 2, "--load", tmp_path, "--exit-on-missing-checkpoint"]),
        "tokenizer_model": (0, [*train, "--mock-data", "--tokenizer-type", "HuggingFaceTokenizer"]),
    }
    for expected, (ranks, flags) in cases.items():
        result = _pretrain(ranks, *flags)
        assert result.returncode != 0, expected
        assert expected in result.stderr, result.stderr
        assert "Traceback" not in result.stderr, result.stderr


@pytest.mark.whole_matrix
def test_wrong_input_under_torchrun() -> None:
    """Printed once by the ranks, and once more per rank in torchrun's final report; every rank exits."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [*TINY, "--train-iters", "2", "--pipeline-model-parallel-size", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [*launcher, "pretrain_gpt.py", *flags], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1, result.stderr
    assert "pipeline_model_parallel_size=3" in result.stderr
    assert 'File "pretrain_gpt.py"' not in result.stderr


def test_sigterm_saves_and_exits(tmp_path: Path) -> None:
    """A job that gets SIGTERM finishes its step, saves, and exits with status 0; it can be resumed."""
    flags = [*TINY, "--train-iters", "100000", "--save", tmp_path, "--log-interval", "1"]
    process = ForkedPopen([*PROGRAM, *map(str, flags)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "iteration 3/" in line:
            process.send_signal(signal.SIGTERM)
            break
    process.stdout.read()
    assert process.wait(timeout=300) == 0
    saved = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert 3 <= saved < 100000
    result = _pretrain(0, *TINY, "--train-iters", saved + 2, "--load", tmp_path)
    assert f"resuming from iteration {saved}" in result.stdout
    assert result.returncode == 0


def test_ctrl_c_saves_too(tmp_path: Path) -> None:
    flags = [*TINY, "--train-iters", "100000", "--save", tmp_path, "--log-interval", "1"]
    command = [*PROGRAM, *map(str, flags)]
    process = ForkedPopen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "iteration 3/" in line:
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert f"saved in {tmp_path}" in output
    assert "Traceback" not in errors
    assert (tmp_path / "latest_checkpointed_iteration.txt").is_file()


def test_notes_before_the_training(tmp_path: Path) -> None:
    """A folder that is in use, a length that is already reached, and a folder that cannot be created."""
    assert _pretrain(0, *TINY, "--train-iters", 2, "--save", tmp_path).returncode == 0
    again = _pretrain(0, *TINY, "--train-iters", 1, "--save", tmp_path)
    assert again.returncode == 1
    assert f"resume with --load {tmp_path}" in again.stderr
    done = _pretrain(0, *TINY, "--train-iters", 2, "--load", tmp_path)
    assert "nothing to train: all 2 iterations" in done.stdout
    blocked = _pretrain(0, *TINY, "--train-iters", 1, "--save", tmp_path / "config.yaml")
    assert blocked.returncode == 1
    assert "cannot be written" in blocked.stderr
    assert "Traceback" not in blocked.stderr
