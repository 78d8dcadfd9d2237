"""Presets have the published sizes."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_run_config
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError
from megatron_core.features.presets.published import PRESETS
from megatron_core.hub.conversion import global_shapes
from tests.runs import TINY

# Elements of all tensors in the published checkpoints.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-160m": 162_322_944,
    "pythia-1.4b": 1_414_647_808,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "olmo2-7b": 7_298_617_344,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352 + 58 * 256,  # the routers' biases, without the layer that predicts a second token
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-next-80b-a3b": 79_674_391_296,  # without the layer that predicts a second token
}


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = parse_run_config(["--model-preset", name, "--mock-data", "--micro-batch-size", "1", "--train-iters", "1"])
    assert list(problems(config, 1)) == []
    shapes = global_shapes(config, config.data.vocab_size)
    found = sum(map(prod, shapes.values()))
    if name == "gpt3-175b":  # published as a rounded number
        assert 174.5e9 < found < 175.5e9
    else:
        assert found == PARAMETERS[name]


def test_files_and_flags_override_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("num_layers: 3\nseq_length: 64\n")
    config = parse_run_config(["--model-preset", "llama3-8b", "--config", str(file), "--seq-length", "32"])
    assert (config.model.num_layers, config.data.seq_length, config.model.rotary_base) == (3, 32, 5e5)
    assert parse_run_config([]) == RunConfig(), "nothing stays behind"
    assert "model_preset" not in TINY | config.flat()


def test_an_unknown_preset_names_similar_ones() -> None:
    with pytest.raises(ConfigError, match=r"model_preset='llama-3-8b' is not known; perhaps you meant llama3-8b"):
        parse_run_config(["--model-preset", "llama-3-8b"])
