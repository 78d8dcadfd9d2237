"""Every reader of JSON of other programs names the file and the key of a value of another type."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepspeed.translation import translate
from megatron.core.dist_checkpointing.core import maybe_load_config
from megatron.core.tokenizers import MegatronTokenizer
from megatron_core.config import DataConfig
from megatron_core.datasets.paths import read_paths
from megatron_core.errors import CheckpointError, MegatronError
from megatron_core.features.conversations.chat_template import _templates_in_config
from megatron_core.foreign_json import LARGEST_JSON, OBJECT, SWITCH, read_object
from megatron_core.hub.deepspeed_conversion import _model_settings
from megatron_core.hub.hugging_face import settings_of_folder
from megatron_core.hub.hugging_face.files import INDEX, TensorFiles
from megatron_core.hub.hugging_face.peft import adapter_settings
from megatron_core.planner.hardware import MACHINES, read_hardware
from megatron_core.vocabularies.hugging_face import generation_ends, named_tokens

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**400
NESTED = {"a": {"b": [1]}}
SWITCHES: list[Any] = ["false", "true", 0, 1, 1.0, [True], NESTED, NAN]
INTEGERS: list[Any] = ["4", 4.9, 4.0, True, [4], NESTED, NAN, INFINITE, HUGE, -1]
WHOLE_NUMBERS = [value for value in INTEGERS if value != 4.0]
"""DeepSpeed accepts 4.0 and 5e8 as integers."""
NUMBERS: list[Any] = ["0.5", True, [0.5], NESTED, NAN, INFINITE, HUGE, -1.0]
STRINGS: list[Any] = [1, 0.5, True, ["a"], NESTED, NAN]
OBJECTS: list[Any] = ["a", 1, True, [1], NAN]
IDS: list[Any] = ["4", 4.0, True, [4, "5"], [[4]], NESTED, NAN, HUGE, -2]

LLAMA = {
    **{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 48, "rms_norm_eps": 1e-5, "vocab_size": 61, "max_position_embeddings": 64},
}


@dataclass(frozen=True)
class Reader:
    """A reader of ``file`` in a folder, a content that it accepts, and values of other types of the keys."""

    file: str
    read: Callable[[Path], object]
    right: dict[str, Any]
    wrong: dict[str, list[Any]]


READERS = {
    "config.json": Reader(
        "config.json",
        settings_of_folder,
        LLAMA,
        {
            **dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"), INTEGERS),
            **dict.fromkeys(("attention_bias", "tie_word_embeddings", "mlp_bias"), SWITCHES),
            **dict.fromkeys(("rms_norm_eps", "rope_theta", "attention_dropout"), NUMBERS),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"), IDS),
            **{"rope_scaling": OBJECTS, "quantization_config": OBJECTS, "model_type": STRINGS, "hidden_act": STRINGS},
        },
    ),
    "the index of weights": Reader(INDEX, TensorFiles, {}, {"weight_map": OBJECTS}),
    "adapter_config.json": Reader(
        "adapter_config.json",
        adapter_settings,
        {"r": 4, "lora_alpha": 8},
        {
            **{"r": INTEGERS, "lora_alpha": NUMBERS, "lora_dropout": NUMBERS, "rank_pattern": OBJECTS},
            **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), SWITCHES),
            **{"peft_type": STRINGS, "bias": STRINGS, "loftq_config": OBJECTS},
        },
    ),
    "tokenizer_config.json": Reader(
        "tokenizer_config.json",
        named_tokens,
        {"eos_token": "</s>"},
        dict.fromkeys(("bos_token", "eos_token", "pad_token"), STRINGS),
    ),
    "the template in tokenizer_config.json": Reader(
        "tokenizer_config.json",
        lambda folder: _templates_in_config(folder / "tokenizer_config.json"),
        {"chat_template": "{{ messages }}"},
        {
            "chat_template": [
                1,
                0.5,
                True,
                ["a"],
                NAN,
                [{"name": 1, "template": "a"}],
                [{"name": "a", "template": NESTED}],
            ]
        },
    ),
    "generation_config.json": Reader(
        "generation_config.json", generation_ends, {"eos_token_id": [1, 2]}, {"eos_token_id": [*IDS[:-2], -1]}
    ),
    "architectures of a model of DeepSpeed": Reader(
        "config.json",
        lambda folder: _model_settings(folder / "config.json"),
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["LlamaForCausalLM", 1, [1], NESTED, True]},
    ),
    "metadata.json": Reader(
        "metadata.json",
        maybe_load_config,
        {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "a_later_key": 1},
        {"sharded_backend": STRINGS, "sharded_backend_version": INTEGERS, "common_backend": STRINGS},
    ),
    "tokenizer_metadata.json": Reader(
        "tokenizer_metadata.json",
        lambda folder: MegatronTokenizer.from_pretrained(str(folder)),
        {"library": "byte-level"},
        {"library": STRINGS, "chat_template": STRINGS},
    ),
    "a machine": Reader(
        "machine.json",
        lambda folder: read_hardware(str(folder / "machine.json")),
        json.loads((MACHINES / "h100.json").read_text()),
        {
            **dict.fromkeys(("memory_bytes", "launch_seconds", "overlap"), NUMBERS),
            **{"devices_per_node": INTEGERS, "has_host": SWITCHES, "name": STRINGS},
            **{"intra": [*OBJECTS, {"bandwidth": "1e9", "latency": 0.0}]},
            **{"product_flops": [*OBJECTS, {}, {"bfloat16": "1e12"}, {"bfloat16": NAN}]},
        },
    ),
    "DeepSpeed's configuration": Reader(
        "ds.json",
        lambda folder: translate(folder / "ds.json", 1),
        {"train_batch_size": 4},
        {
            **dict.fromkeys(("train_batch_size", "gradient_accumulation_steps"), WHOLE_NUMBERS),
            **dict.fromkeys(("fp16", "bf16", "scheduler", "optimizer"), OBJECTS),
            **{"gradient_clipping": NUMBERS, "zero_optimization": [1, "a", [1], 0.5]},
        },
    ),
    "files of each split": Reader(
        "splits.json",
        lambda folder: read_paths(DataConfig(per_split_data_args_path=str(folder / "splits.json"))),
        {"train": ["a"]},
        {"train": [1, 0.5, True, NESTED, ["a", True], [["a"]], NAN], "valid": [1, False, NESTED, [None]]},
    ),
}
CASES = [(name, key) for name, reader in READERS.items() for key in reader.wrong]


def write(folder: Path, reader: Reader, **changes: Any) -> None:
    (folder / reader.file).write_text(json.dumps(reader.right | changes))


@pytest.mark.parametrize(("name", "key"), CASES, ids=[f"{name}: {key}" for name, key in CASES])
def test_a_value_of_another_type_is_one_sentence_with_file_and_key(name: str, key: str, tmp_path: Path) -> None:
    reader = READERS[name]
    accepted = []
    for value in reader.wrong[key]:
        write(tmp_path, reader, **{key: value})
        try:
            reader.read(tmp_path)
        except MegatronError as error:
            assert key in str(error), (value, str(error))
            assert "\n" not in str(error) and len(str(error)) < 1_000
        else:
            accepted.append(value)
    assert not accepted


@pytest.mark.parametrize("name", READERS)
def test_the_right_content_is_read(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    write(tmp_path, reader)
    if name in ("the index of weights", "adapter_config.json"):  # they need the weights, too
        with pytest.raises(CheckpointError, match=r"has no weight_map|has neither adapter_model"):
            reader.read(tmp_path)
    else:
        reader.read(tmp_path)


CONTENTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (lambda path: path.write_text("{"), "cannot be read as JSON"),
    "a list": (lambda path: path.write_text("[]"), "contains a list, not an object"),
    "null": (lambda path: path.write_text("null"), "contains a NoneType, not an object"),
    "deep lists": (lambda path: path.write_text("[" * 10**5), "nested too deeply"),
    "a number of many digits": (lambda path: path.write_text("1" * 10**4), "cannot be read as JSON: Exceeds the limit"),
    "other bytes": (lambda path: path.write_bytes(b"{\xff}"), "cannot be read as JSON"),
    "nothing": (lambda path: path.write_text(""), "cannot be read as JSON"),
    "a folder": (lambda path: path.mkdir(), "cannot be read as JSON: Is a directory"),
    "a named pipe": (os.mkfifo, "it is a named pipe; use a file"),
    "no file": (lambda path: None, "no such file"),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_files_without_an_object(kind: str, tmp_path: Path) -> None:
    make, message = CONTENTS[kind]
    path = tmp_path / "a.json"
    make(path)
    with pytest.raises(CheckpointError, match=rf"a\.json.*{message}.*; copy the file again") as found:
        read_object(path, CheckpointError, "copy the file again")
    assert "\n" not in str(found.value)


def test_types_of_nested_keys_and_null(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"on": None, "other": 3}))
    assert read_object(path, CheckpointError, "", {"on": SWITCH}) == {"on": None, "other": 3}
    path.write_text(json.dumps({"in": {"on": "false"}}))
    with pytest.raises(CheckpointError, match=r"says in\.on='false'; it must be true or false; copy"):
        read_object(path, CheckpointError, "copy", {"on": SWITCH, "in": OBJECT})
    assert LARGEST_JSON >= 2**27
