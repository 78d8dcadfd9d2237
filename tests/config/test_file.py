"""Configuration files: read as YAML or JSON and checked by type; a written YAML file is equal when read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.config import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_core.config.cli import parse_run_config, write_config
from megatron_core.config.file import read_config
from megatron_core.config.run import field_types, section_types
from megatron_core.errors import ConfigError


def parse(text: str) -> RunConfig:
    return parse_run_config(text.split())


def test_flags_override_the_file_which_overrides_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "num-layers: 5\nmodel:\n  hidden_size: 96\n  swiglu: true\nlr: 1e-4\ntrain_iters: 1e3\n"
        "data_path: [0.3, A, 0.7, B]\ntrain_data_path: C\nsave: null\nbf16: true\n"
    )
    config = parse(f"--config {file} --num-layers 7 --no-bf16")
    assert (config.model.num_layers, config.model.hidden_size, config.model.swiglu) == (7, 96, True)
    assert config.optimizer.lr == 1e-4 and config.training.train_iters == 1000
    assert config.data.data_path == ("0.3", "A", "0.7", "B") and config.data.train_data_path == ("C",)
    assert config.checkpoint.save is None and not config.training.bf16


def test_json_files_are_read_too(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"parallel": {"tensor-model-parallel-size": 2}, "lr": 1e-5}))
    config = parse(f"--config={file}")
    assert config.parallel.tensor_model_parallel_size == 2 and config.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("num_layer: 3", ["num_layer", "perhaps you meant num_layers"]),
        ("model:\n  hiden_size: 3", ["hiden_size", "perhaps you meant hidden_size"]),
        ("zzz: 3", ["zzz", "--help"]),
        ("fp4_format: e2m1", ["Megatron-LM's fp4_format", "not supported"]),
        ("num_layers: two", ["num_layers='two'", "an integer"]),
        ("num_layers: 2.5", ["num_layers=2.5", "an integer"]),
        ("num_layers: true", ["num_layers=True", "an integer"]),
        ("num_layers: null", ["num_layers=None", "an integer"]),
        ("num_layers: .inf", ["num_layers=inf", "an integer"]),
        ("bf16: 1", ["bf16=1", "true or false"]),
        ("normalization: BatchNorm", ["BatchNorm", "LayerNorm, RMSNorm"]),
        ("recompute_method: all", ["all", "uniform, block or null"]),
        ("lr: fast", ["lr='fast'", "a number"]),
        ("data_path: [[a]]", ["data_path", "a list of strings"]),
        ("iterations_to_skip: [a]", ["iterations_to_skip", "a list of integers"]),
        ("rampup_batch_size: [1, 2]", ["rampup_batch_size", "a list of 3 integers"]),
        ("recompute_modules: [norm]", ["recompute_modules", "a list of core_attn, layernorm"]),
        ("lr: 1\noptimizer:\n  lr: 2", ["lr", "twice"]),
        ("model: gpt", ["model='gpt'", "section"]),
        ("- a", ["list", "name: value"]),
        ("a: [", ["not valid YAML"]),
    ],
)
def test_faults_of_a_file_are_named(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parse(f"--config {file}")
    for word in [*words, str(file)]:
        assert word in str(error.value)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        parse("--config nowhere.yaml")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        parse(f"--config {tmp_path / 'a.json'}")
    with pytest.raises(ConfigError, match="/dev/zero cannot be read: it has more than 16777216 bytes"):
        parse("--config /dev/zero")


def test_an_empty_file_changes_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text("")
    assert parse(f"--config {tmp_path / 'run.yaml'}") == RunConfig()


def test_yaml_cannot_build_objects(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: !!python/object/apply:os.getpid []")
    with pytest.raises(ConfigError, match="not valid YAML"):
        parse(f"--config {file}")


SECTIONS = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "monitor": MonitorConfig,
}


@settings(max_examples=30, deadline=None)
@given(config=st.builds(RunConfig, **{name: st.from_type(kind) for name, kind in SECTIONS.items()}))
def test_written_config_reads_back_equal(tmp_path_factory, config):
    file = tmp_path_factory.mktemp("config") / "run.yaml"
    values = config.flat()
    flat = [each for value in values.values() for each in (value if isinstance(value, tuple) else (value,))]
    if any(each != each for each in flat):  # NaN is not equal to itself
        return
    if "None" in flat:  # the YAML word for None
        return
    if any(isinstance(number, int) and abs(number) >= 2**63 for number in flat):  # outside the legal integers
        return
    write_config(config, file)
    assert read_config(file) == config


def test_written_config_is_a_config_file(tmp_path):
    config = parse("--num-layers 3 --data-path 0.3 A 0.7 B --adam-eps 1e-10 --no-load-optim --bf16 --split 9,1,0")
    file = tmp_path / "run.yaml"
    write_config(config, file)
    assert parse(f"--config {file}") == config


DAMAGE = {
    "twice.yaml": ("lr: 1\nlr: 2\n", "lr occurs twice"),
    "inner.yaml": ("model:\n  num_layers: 1\n  num_layers: 2\n", "num_layers occurs twice"),
    "twice.json": ('{"lr": 1, "lr": 2}', "lr occurs twice"),
    "deep.json": ("[" * 100_000, "not valid JSON"),
    "deep.yaml": ("[" * 3_000, "not valid YAML"),
    "number.json": ('{"num_layers": ' + "1" * 5_000 + "}", "not valid JSON"),
    "long.yaml": ("num_layers: " + "x" * 100_000, r"\.\.\. \(100,002 characters\)"),
    "name.json": ('{"' + "x" * 100_000 + '": 1}', "100,000 characters"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_one_short_sentence(name, tmp_path):
    text, words = DAMAGE[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_config(tmp_path / name)
    assert len(str(error.value)) < 1000


def test_all_faults_of_a_file_come_in_one_message(tmp_path):
    """Together with those of flags and of the remaining settings on the command line."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "num_layer: 2\nhidden_size: wide\nparallel: 3\ntraining:\n  zork: 1\nseq_length: 8\nseq-length: 9\n"
    )
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"5 settings of {file} cannot be used:"
    words = ("perhaps you meant num_layers", "hidden_size='wide'", "parallel is a section", "zork", "seq_length occurs")
    assert all(word in line for word, line in zip(words, lines[1:], strict=True))
    with pytest.raises(ConfigError) as caught:
        parse(f"--config {file} --no-such-flag")
    assert str(caught.value).startswith("6 settings cannot be used") and "--no-such-flag" in str(caught.value)
    assert all(word in str(caught.value) for word in words)
    file.write_text("zork: 1\n")
    with pytest.raises(ConfigError, match=f"^zork in {file} is not a setting; --help all lists every setting$"):
        read_config(file)


def test_other_names_of_values_are_those_of_flags(tmp_path):
    file = tmp_path / "run.yaml"
    for name in ("AdamW", "adamw", "adam"):
        file.write_text(f"optimizer:\n  optimizer: {name}\n")
        assert read_config(file).optimizer.optimizer == parse(f"--optimizer {name}").optimizer.optimizer == "adam"


def test_settings_with_the_name_of_a_section_are_read_without_it(tmp_path: Path) -> None:
    both = set(section_types()) & set(field_types())
    assert {"optimizer", "outer_steps", "qk_clip"} <= both
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: sgd\nouter_steps: 4\nqk_clip: true\n")
    config = read_config(path)
    assert [config.value(name) for name in ("optimizer", "outer_steps", "qk_clip")] == ["sgd", 4, True]
    write_config(config, tmp_path / "written.yaml")
    assert read_config(tmp_path / "written.yaml") == config
