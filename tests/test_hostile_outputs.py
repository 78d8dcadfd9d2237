"""No command and no flag of training loses a file of the user, whatever is given as its output.

The tables name every text of every command and every text among the settings of training, so that a new output cannot
be forgotten.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

import pytest

from megatron_core import commands
from megatron_core.checkpoint.folder import TRACKER
from megatron_core.commands.convert_checkpoint import ConvertFlags as ConvertSettings
from megatron_core.commands.convert_checkpoint import convert_checkpoint
from megatron_core.config.run import field_types
from megatron_core.errors import MegatronError
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.preprocess.settings import PreprocessSettings
from tests.checkpoint.test_foreign import job
from tests.datasets.files import write
from tests.monitor.examples import step
from tests.programs import run_program

NOTES = "the user's notes\n"


@dataclass(frozen=True)
class Written:
    """A flag of a command that names an output."""

    words: str
    """A command line without the output, in the folder of the fixture ``place``."""
    input: str
    """A file or folder that the command reads."""
    suffix: str = ""
    """Suffix of the output, if the command requires one."""


WRITES: dict[tuple[str, str], Written] = {
    ("collect_corpus", "output"): Written("--folder texts", "texts/a.txt", ".jsonl"),
    ("corpus_report", "output"): Written("--workers 1 --input tokens", "tokens.bin", ".json"),
    ("corpus_report", "png"): Written("--workers 1 --input tokens --output report.json", "tokens.bin", ".png"),
    ("deepspeed_config", "output"): Written("--from-json ds.json", "ds.json"),
    ("deepspeed_config yaml", "output"): Written("--from-yaml c.yaml", "c.yaml"),
    ("diagnose", "json"): Written("run", "run/metrics.jsonl"),
    ("diagnose machine", "output"): Written("--machine --quick --ranks 1", "own.json"),
    ("from_megatron", "output"): Written("train.sh", "train.sh"),
    ("generate_text", "output"): Written("--load native --prompt a", "native/iter_0000002/manifest.json"),
    ("inspect_dataset", "png"): Written("tokens", "tokens.bin", ".png"),
    ("merge_datasets", "output_prefix"): Written("--overwrite --input tokens", "tokens"),
    ("plan_layout", "json"): Written("--config c.yaml --gpus 2 --vocab-size 64 --global-batch-size 4", "c.yaml"),
    ("plan_layout png", "png"): Written("--config c.yaml --gpus 2 --vocab-size 64 --explain-memory", "c.yaml", ".png"),
    ("plot_metrics", "out"): Written("run/metrics.jsonl", "run/metrics.jsonl", ".png"),
    ("preprocess_data", "output_prefix"): Written(
        "--overwrite --input text.jsonl --workers 1 --tokenizer-type ByteLevelTokenizer", "text"
    ),
    ("report", "out"): Written("run", "run/metrics.jsonl"),
    ("show_schedule", "png"): Written("", "own.png", ".png"),
    ("show_schedule", "trace"): Written("", "own.json"),
    ("show_schedule", "json"): Written("--plan plan.txt", "plan.txt"),
    ("train_tokenizer", "output"): Written("--input text.json --vocab-size 300", "text.json", ".json"),
    ("verify_layout", "json"): Written("--layouts tp2 --config c.yaml", "c.yaml"),
    ("verify_layout", "markdown"): Written("--layouts tp2 --config c.yaml", "c.yaml"),
}
CONVERTED = ("convert_checkpoint", "save")
"""Has a test of its own, with folders of all formats."""
READS: dict[str, set[str]] = {
    "collect_corpus": {"folder", "pattern"},
    "compare_hashes": {"one", "other"},
    "convert_checkpoint": {"load", "source", "to", "tag", "hf_config", "model_type", "dtype"},
    "corpus_report": {
        "input", "engine", "partition", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file",
        "tiktoken_pattern",
    },
    "deepspeed_config": {"from_json", "from_yaml"},
    "diagnose": {"run", "disk", "hardware"},
    "from_megatron": {"command", "variables", "read_from", "hardware"},
    "generate_text": {"load", "prompt", "prompt_file", "stop"},
    "inspect_checkpoint": {"checkpoint", "diff"},
    "inspect_dataset": {
        "prefix", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern"
    },
    "merge_datasets": {"input"},
    "plan_layout": {"hardware", "objection"},
    "plot_metrics": {"metrics", "title"},
    "preprocess_data": {
        "input", "json_keys", "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern",
        "document_separator", "tokenization_backend", "engine", "partition",
    },
    "post_train": {"host", "model_name"},
    "replay_step": {"step"},
    "report": {"run", "compare"},
    "serve": {"load", "host", "model_name", "chat_template"},
    "show_schedule": {"schedule", "compare", "plan", "costs", "measured"},
    "train_tokenizer": {"input", "special_tokens", "json_keys"},
    "verify_layout": {"layouts"},
    "verify_module": {"target", "batches", "plan", "layout", "heads"},
}  # fmt: skip
TRAINING_READS = {
    "heterogeneous_layers_config_encoded_json", "hybrid_layer_pattern", "attention_kind",
    "pipeline_model_parallel_layout", "pipeline_plan", "rank_order", "step_batch_size_schedule", "optimizer",
    "lora_target_modules", "lora_load", "pretrained_checkpoint", "kd_teacher", "data_path", "data_args_path",
    "train_data_path", "valid_data_path", "test_data_path", "validation_set_names", "choices_data_path",
    "per_split_data_args_path", "data_phases", "split", "chat_template", "chat_template_date", "fim_split_sample",
    "fim_no_prefix", "fim_prefix_token", "fim_middle_token", "fim_suffix_token", "fim_pad_token", "fim_eod_token",
    "tokenizer_model", "vocab_file", "merge_file", "load", "load_hf", "hf_model_type", "changed_model_settings",
    "hf_token_ids", "grad_compression",
    "wandb_project", "wandb_exp_name", "wandb_entity", "mlflow_experiment", "mlflow_run_name", "inject_fault",
}  # fmt: skip
FAST = {"non_persistent_save_interval": 1, "save": "saved"}
TRAINING_WRITES: dict[str, dict[str, object]] = {
    "save": {},
    "non_persistent_global_ckpt_dir": FAST,
    "non_persistent_local_ckpt_dir": FAST | {"non_persistent_ckpt_type": "local"},
    "metrics_file": {},
    "prometheus_file": {},
    "tensorboard_dir": {},
    "trace_pipeline": {},
    "profile_dir": {"profile": True, "profile_step_start": 0, "profile_step_end": 1},
    "optimizer_offload_dir": {"optimizer_cpu_offload": True},
    "zero3_param_offload_dir": {"zero_stage": 3, "zero3_param_cpu_offload": True},
    "data_cache_path": {},
    "wandb_save_dir": {},
    "mlflow_tracking_uri": {},
}
"""Settings with the further settings that let them have an effect."""
OF_LIBRARIES = {"wandb_save_dir", "mlflow_tracking_uri", "data_cache_path"}
"""Written by other packages, or under names of hashes, with new names only."""


# --- The tables are complete.


def texts_of(kind: Callable[..., object]) -> set[str]:
    """The parameters that are texts or paths."""
    parameters = inspect.signature(kind).parameters
    return {name for name, each in parameters.items() if any(w in str(each.annotation) for w in ("str", "Path", "Lit"))}


def parsers() -> Iterator[tuple[str, Callable[..., object]]]:
    """The dataclass, or function, that describes the flags of each command."""
    for module in pkgutil.iter_modules(commands.__path__):
        content = vars(importlib.import_module(f"{commands.__name__}.{module.name}"))
        for name in ("Settings", "Options", "plot"):
            if name in content:
                yield module.name, content[name]
    yield "preprocess_data", PreprocessSettings


@pytest.mark.parametrize("command", dict(parsers()))
def test_every_text_of_a_command_is_in_a_table(command: str) -> None:
    """A new flag that names an output needs a row in WRITES."""
    texts = texts_of(dict(parsers())[command])
    written = {flag for name, flag in (*WRITES, CONVERTED) if name.split()[0] == command}
    choices = {"algorithm", "dtype", "device", "format", "x", "source", "to", "kv_cache_dtype", "dtypes"}
    assert texts - choices - READS.get(command, set()) == written
    assert not written & READS.get(command, set())


def test_every_text_among_the_settings_of_training_is_in_a_table() -> None:
    texts = {name for name, kind in field_types().items() if "str" in str(kind) and "Literal" not in str(kind)}
    assert texts == TRAINING_READS | set(TRAINING_WRITES) and not TRAINING_READS & set(TRAINING_WRITES)


# --- Hostile outputs.


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs of all commands, and files, folders and links of the user."""
    root = tmp_path_factory.mktemp("prepared")
    sink = JsonLinesSink(root / "run/metrics.jsonl")
    sink.on_step(step(1))
    sink.close()
    (root / "c.yaml").write_text("num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 32\n")
    (root / "ds.json").write_text('{"train_batch_size": 8}\n')
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    (root / "train.sh").write_text(f"torchrun --nproc-per-node 2 pretrain_gpt.py {model}\n")
    (root / "plan.txt").write_text("F0\n")
    for name in ("text.json", "text.jsonl"):
        (root / name).write_text('{"text": "some words of a text"}\n')
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("some words of a text\n")
    write(root / "tokens", [[1, 2, 3], [4, 5]])
    job(save=str(root / "native"), train_iters=2)
    # Of the user.
    for suffix in (".txt", ".json", ".jsonl", ".png", ".yaml", ".bin", ".idx"):
        for end in (suffix, f"_text_document{suffix}"):
            (root / f"own{end}").write_text(NOTES)
            (root / f"link{end}").symlink_to(f"own{end}")
            (root / f"dangling{end}").symlink_to("absent")
    (root / "link").symlink_to("own.txt")
    (root / "dangling").symlink_to("absent")
    (root / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"a photograph")
    (root / "corpus.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (root / "tokenizer.json").write_text('{"model": {}, "added_tokens": []}')
    (root / "folder").mkdir()
    (root / "folder" / "notes.txt").write_text(NOTES)
    (root / "linked").symlink_to("folder")
    (root / "sub").mkdir()
    (root / "megatron" / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    (root / "megatron" / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(b"weights")
    (root / "megatron" / "iter_0000002" / "notes.txt").write_text(NOTES)
    (root / "megatron" / TRACKER).write_text("5")
    (root / "deepspeed" / "global_step2").mkdir(parents=True)
    (root / "deepspeed" / "global_step2" / "mp_rank_00_model_states.pt").write_bytes(b"weights")
    (root / "deepspeed" / "latest").write_text("global_step2")
    (root / "huggingface").mkdir()
    (root / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
    (root / "huggingface" / "model.safetensors").write_bytes(b"weights")
    return root


@pytest.fixture
def place(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "place"
    shutil.copytree(prepared, root, symlinks=True)
    os.mkfifo(root / "pipe")
    monkeypatch.chdir(root)
    return root


State = dict[str, tuple[int, bytes | str | None]]


def state(root: Path) -> State:
    """Kind and content of everything below ``root``."""
    found: State = {}
    for path in sorted(root.rglob("*")):
        kind = stat.S_IFMT(path.lstat().st_mode)
        content: bytes | str | None = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(root))] = kind, content
    return found


def check_nothing_is_lost(root: Path, before: State, what: object) -> State:
    """Compare with the state before; return what is new."""
    after = state(root)
    lost = [name for name, content in before.items() if after.get(name) != content]
    assert not lost, (what, lost)
    return {name: content for name, content in after.items() if name not in before}


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """End a test that waits for a named pipe."""

    def stop(number: int, frame: FrameType | None) -> None:
        pytest.fail("it waits, perhaps for a named pipe")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def hostile(written: Written) -> list[str]:
    """Outputs that must be refused."""
    suffix = written.suffix or ".txt"
    files = [f"own{suffix}", f"link{suffix}", f"dangling{suffix}", "own.yaml", "ds.json", "photo.png", "corpus.jsonl"]
    files += ["tokenizer.json", "link", "folder", "linked", "megatron", ".", "sub/..", "pipe", written.input]
    return [name for name in files if not written.suffix or name.endswith((suffix, "."))] + ["own.txt"]


@pytest.mark.every_case
@pytest.mark.parametrize("row", WRITES, ids=lambda row: f"{row[0]} {row[1]}")
def test_a_command_refuses_outputs_that_are_not_its_own(row: tuple[str, str], place: Path) -> None:
    (name, flag), written = row, WRITES[row]
    before = state(place)
    is_prefix = flag == "output_prefix"
    outputs = ["own", "link", "dangling", "tokens"] if is_prefix else hostile(written)
    for output in dict.fromkeys(outputs):
        if output == "tokens" and name != "merge_datasets":
            continue  # its files have other names
        words = [*written.words.split(), f"--{flag.replace('_', '-')}", output]
        result = run_program(f"tools/{name.split()[0]}.py", *words, cwd=place)
        new = check_nothing_is_lost(place, before, output)
        assert result.returncode and "Traceback" not in result.stderr, (output, result.stderr)
        fault = result.stderr.splitlines()[-1]
        assert output in fault and any(reason in fault for reason in REASONS), (output, result.stderr)
        assert not new, (output, new)


REASONS = (
    "not overwritten",
    "would overwrite",
    "symbolic link",
    "Is a directory",
    "named pipe",
    "not a token file",
    "not the header of",
)
REASONS += ("is one of the inputs", "may not be a token file", "unknown format")
FOLDERS = ("native", "folder", "linked", "megatron", "deepspeed", "huggingface", ".", "sub/..", "own.txt", "link")
FOLDERS += ("dangling", "pipe")


@pytest.mark.every_case
@pytest.mark.parametrize("target", ["megatron", "torch_dcp", "hf", "peft", "native"])
def test_a_conversion_writes_into_empty_folders_only(target: str, place: Path) -> None:
    before = state(place)
    for save in FOLDERS:
        source, load = ("native", "native") if target != "native" else ("hf", "huggingface")
        with pytest.raises((MegatronError, OSError)) as error:
            convert_checkpoint(ConvertSettings(source=source, to=target, load=load, save=save, verify=False))
        assert not check_nothing_is_lost(place, before, save), (save, error)


@pytest.mark.parametrize("target", ["megatron", "torch_dcp", "hf"])
def test_a_conversion_into_the_current_folder(target: str, place: Path, tmp_path: Path) -> None:
    """If it is empty, it is filled, and stays the same folder; the temporary folder is gone."""
    (tmp_path / "empty").mkdir()
    os.chdir(tmp_path / "empty")
    before = os.stat(".").st_ino
    convert_checkpoint(ConvertSettings(source="native", to=target, load=str(place / "native"), save=".", verify=False))
    assert os.stat(".").st_ino == before
    names = {path.name for path in Path().iterdir()}
    assert names == ({"config.json", "model.safetensors"} if target == "hf" else {"iter_0000002", TRACKER})


@pytest.mark.every_case
@pytest.mark.parametrize("flag", sorted(TRAINING_WRITES.keys() - OF_LIBRARIES))
def test_a_training_run_loses_no_file(flag: str, place: Path) -> None:
    """A folder that the run may use gets new files only; everything else is an error."""
    before = state(place)
    for output in ("native", *FOLDERS[1:], "own.json", "own.yaml", "corpus.jsonl", "run/metrics.jsonl", "c.yaml"):
        with suppress(MegatronError, OSError):
            job(**{"train_iters": 1, **TRAINING_WRITES[flag], flag: output})
        metrics = place / "run/metrics.jsonl"
        if flag == "metrics_file" and output == "run/metrics.jsonl":  # its own format: it appends
            kept = before[output][1]
            assert isinstance(kept, bytes) and metrics.read_bytes().startswith(kept) and metrics.read_bytes() != kept
            metrics.write_bytes(kept)
        for name in check_nothing_is_lost(place, before, output):
            path = place / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.is_symlink() or path.exists():
                path.unlink()


def test_fields_of_the_tables_exist() -> None:
    assert {field.name for field in fields(ConvertSettings)} >= READS["convert_checkpoint"]
