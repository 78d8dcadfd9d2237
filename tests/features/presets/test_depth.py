"""``--depth``: shapes, batches and lengths of training follow their formulas, and every value is a default."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.config.validate import check
from megatron_core.errors import ConfigError
from megatron_core.features.presets.depth import settings_of_depth
from megatron_core.planner.parameters import layer_parameters


@pytest.mark.parametrize("depth", [1, 3, 4, 20, 64])
def test_settings_follow_the_formulas(depth: int) -> None:
    config = parse_run_config(["--depth", str(depth), "--mock-data", "--vocab-size", "256"])
    check(config, 1)
    matrices = sum(
        layer_parameters(config, layer).dense - layer_parameters(config, layer).outside for layer in range(depth)
    )
    assert matrices == 12 * depth * (64 * depth) ** 2
    assert config.model.width_ratio == depth / 4
    tokens = config.training.train_iters * config.training.global_batch_size * config.data.seq_length
    assert 20 * matrices <= tokens < 20 * matrices + config.training.global_batch_size * config.data.seq_length
    optimal = 0.2920 * (6 * matrices * 20 * matrices) ** 0.3271
    batch = config.training.global_batch_size * config.data.seq_length
    assert optimal / 1.5 < batch < optimal * 1.5 or config.training.global_batch_size == 1


def test_flags_and_files_override_the_dial(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("hidden_size: 256\nlr: 0.5\n")
    config = parse_run_config(["--depth", "3", "--config", str(tmp_path / "run.yaml"), "--lr", "0.25"])
    assert (config.model.num_layers, config.model.hidden_size, config.optimizer.lr) == (3, 256, 0.25)


LATENT = "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64"
DELTA = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        ("--swiglu", "squared_relu"),
        ("--quick-geglu", "squared_relu"),
        ("--train-samples 3200", "train_iters"),
        ("--lr-warmup-iters 7", "lr_warmup_fraction"),
        ("--train-samples 3200 --lr-warmup-samples 320", "lr_warmup_fraction"),
        (LATENT, "use_mup"),
        (DELTA, "use_mup"),
        ("--no-use-mup", "use_mup"),
    ],
)
def test_flags_that_exclude_a_value_of_the_dial_replace_it(flags: str, gone: str) -> None:
    config = parse_run_config(["--depth", "4", "--mock-data", "--vocab-size", "256", *flags.split()])
    check(config, 1)
    values, defaults = config.flat(), RunConfig().flat()
    assert values[gone] == defaults[gone] != settings_of_depth(4)[gone]


def test_a_file_excludes_values_of_the_dial(tmp_path) -> None:
    (tmp_path / "run.yaml").write_text("swiglu: true\nmodel:\n  use_mup: false\ntrain_samples: null\n")
    model = (config := parse_run_config(["--depth", "4", "--config", str(tmp_path / "run.yaml")])).model
    assert (model.swiglu, model.squared_relu, model.mup_base_hidden_size) == (True, False, None)
    assert config.training.train_iters == settings_of_depth(4)["train_iters"]
    (tmp_path / "run.yaml").write_text("swiglu: false\n")
    assert parse_run_config(["--depth", "4", "--config", str(tmp_path / "run.yaml")]).model.squared_relu


def test_a_negative_depth_is_out_of_range() -> None:
    with pytest.raises(ConfigError, match="depth=-1 is out of range; legal: 1 to 1024"):
        parse_run_config(["--depth", "-1"])


@pytest.mark.parametrize("depth", [0, 2000])
def test_depth_is_limited(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"depth={depth} is out of range; legal: 1 to 1024"):
        settings_of_depth(depth)


def test_depth_excludes_a_preset() -> None:
    with pytest.raises(ConfigError, match="model_preset=llama3-8b and depth both choose the model"):
        parse_run_config(["--depth", "4", "--model-preset", "llama3-8b"])
