"""Tests of megatron-deepspeed-config: JSON to YAML and back, and the page of all keys."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepspeed.reverse import to_deepspeed
from deepspeed.translation import translate
from megatron_core.commands.deepspeed_config import key_page, main
from megatron_core.config import RunConfig
from megatron_core.config.file import write_config
from megatron_core.errors import ConfigError

ROOT = Path(__file__).parents[3]


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/deepspeed_keys.md").read_text() == key_page(), "tools/deepspeed_config.py --page"


@pytest.mark.parametrize(
    "config",
    (
        {"bf16": {"enabled": True}, "communication_data_type": "bf16", "gradient_clipping": 0.5},
        {"fp16": {"enabled": True, "initial_scale_power": 9}, "optimizer": {"type": "Lion", "params": {"lr": 0.1}}},
        {"fp16": {"enabled": True, "loss_scale": 128}, "optimizer": {"type": "SGD", "params": {"momentum": 0.5}}},
        {
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 7, "betas": [0.8, 0.9]}},
        },
        {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
        {"optimizer": {"type": "Lamb", "params": {"max_coeff": 0.3, "min_coeff": 0.02, "betas": [0.8, 0.9]}}},
        {"optimizer": {"type": "Lamb", "params": {"bias_correction": False}}},
        {
            "zero_optimization": {"stage": 1},
            "optimizer": {"type": "OneBitLamb", "params": {"freeze_step": 7, "coeff_beta": 0.8, "factor_max": 3.0}},
        },
        {
            "optimizer": {
                "type": "ZeroOneAdam",
                "params": {"var_freeze_step": 7, "var_update_scaler": 3, "local_step_clipper": 8, "cuda_aware": True},
            }
        },
        {
            "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 100}
            | {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
            | {"offload_param": {"device": "nvme", "nvme_path": "weights"}},
            "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1, "eps": 1e-6}},
        },
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
)
def test_the_round_trip_keeps_all_settings(config: dict[str, Any], tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, middle, last = (tmp_path / name for name in ("a.json", "b.yaml", "c.json"))
    first.write_text(json.dumps({"train_batch_size": 8, "gradient_accumulation_steps": 2, **config}))
    monkeypatch.setattr(sys, "argv", ["", "--from-json", str(first), "--world-size", "2", "--output", str(middle)])
    main()
    monkeypatch.setattr(sys, "argv", ["", "--from-yaml", str(middle), "--output", str(last)])
    main()
    assert translate(last, 2).settings == yaml.safe_load(middle.read_text()) == translate(first, 2).settings
    assert translate(last, 2).gradient_accumulation_steps == 2


def test_steps_of_compressed_optimizers_are_translated() -> None:
    params = {"var_freeze_step": 7, "local_step_scaler": 50}
    config: dict[str, Any] = {"train_batch_size": 4, "optimizer": {"type": "ZeroOneAdam", "params": params}}
    settings = translate(config, 2).settings
    assert (settings["zero_one_var_freeze_step"], settings["zero_one_local_step_scaler"]) == (8, 50)
    with pytest.raises(ConfigError, match=r"ZeroOneAdam needs zero_optimization\.stage 0"):
        translate({**config, "zero_optimization": {"stage": 1}}, 2)
    config["optimizer"] = {"type": "OneBitLamb", "params": {"freeze_step": 5, "factor_threshold": 0.2}}
    settings = translate(config, 2).settings
    assert (settings["optimizer"], settings["grad_compression_warmup_iters"]) == ("lamb", 5)
    assert settings["onebit_lamb_factor_threshold"] == 0.2


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"adam_beta2": 0.95, "lr": 3e-4, "weight_decay": 0.1, "bf16": True, "zero_stage": 2, "clip_grad": 0.5},
    "lion": {
        "optimizer": "lion", "lion_beta1": 0.8, "fp16": True, "zero_stage": 1, "hysteresis": 3,
        "initial_loss_scale": 256.0,
    },
    "sgd": {"optimizer": "sgd", "sgd_momentum": 0.5, "weight_decay": 0.0, "ddp_bucket_size": 1000},
    "lamb": {"optimizer": "lamb", "lamb_bias_correction": "none", "lamb_max_coeff": 5.0, "adam_beta1": 0.8},
    "onebit-adam": {
        "grad_compression": "onebit-adam", "adam_bias_correction": False, "grad_compression_warmup_iters": 9
    },
    "offload": {"zero_stage": 2, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("changed_only", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_file_that_a_run_wrote_is_read(
    name: str, changed_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its settings are nested by section and include those with their default, of all parts of the product."""
    common = {"micro_batch_size": 2, "global_batch_size": 8, "lr": 0.01, "train_iters": 3, "hidden_size": 48}
    config = RunConfig.from_flat(RunConfig().flat() | common | OPTIMIZERS[name])
    write_config(config, tmp_path / "config.yaml", changed_only=changed_only)
    monkeypatch.setattr(sys, "argv", ["", "--from-yaml", str(tmp_path / "config.yaml")])
    main()
    printed = capsys.readouterr()
    translated = translate(json.loads(printed.out), 2).settings
    for setting, value in (common | OPTIMIZERS[name]).items():
        if setting in ("train_iters", "hidden_size"):
            assert f"{setting}={value}" in printed.err
        else:
            assert translated[setting] == value, setting
    flat = config.flat()
    flat["zero_stage"] = flat["zero_stage"] or 0
    others = {setting: (value, flat[setting]) for setting, value in translated.items() if value != flat[setting]}
    assert changed_only or not others


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model: 3", "model is a section"),
        ("optimizer:\n  lr: x", "lr='x' in .* does not fit"),
        ("nonsense: 1", "nonsense in .* is not a setting"),
        ("[1]", "holds a list"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["", "--from-yaml", str(tmp_path / "wrong.yaml")])
    with pytest.raises(ConfigError, match=fault) as error:
        main()
    assert "\n" not in str(error.value)


def test_settings_without_a_key_are_returned() -> None:
    assert to_deepspeed({"micro_batch_size": 1, "seed": 3}) == ({"train_micro_batch_size_per_gpu": 1}, {"seed": 3})


def test_the_batch_of_a_file_for_deepspeed_counts_all_ranks() -> None:
    settings = {"micro_batch_size": 2, "global_batch_size": 8, "tensor_model_parallel_size": 2}
    values, _ = to_deepspeed(settings)
    assert values["train_batch_size"] == 16
    assert translate(values, 4).settings.items() >= settings.items()
