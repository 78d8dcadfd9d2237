"""Layers of different sizes: reading of the JSON, FLOPs, stages of equal cost, small models."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_core.config import RunConfig
from megatron_core.config.cli import parse_run_config, read_flags
from megatron_core.config.file import read_config, write_config
from megatron_core.config.flops import forward_flops_per_token
from megatron_core.config.partition import layers_by_stage, partition_by_cost
from megatron_core.config.validate import problems
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.features.layer_sizes.settings import LAYERS_JSON, read_blocks, write_blocks
from megatron_core.planner.layout import Layout
from megatron_core.verify.comparison import configured
from megatron_core.verify.shrink import shrunk
from tests.parity.heterogeneous_rows import BLOCKS, LAYERS, NEMOTRON

FLAGS = ["--num-layers", "5", "--hidden-size", "32", "--mock-data", "--train-iters", "1"]


def test_the_json_is_read_from_a_file_a_flag_and_a_config_file(tmp_path: Path) -> None:
    text, path = write_blocks(BLOCKS), tmp_path / "layers.json"
    path.write_text(json.dumps(json.loads(text) | {"vocab_size": 7}, indent=2))
    own = tmp_path / "run.yaml"
    own.write_text(f"heterogeneous_layers_config_path: {path}\nnum_layers: 5\n")
    by_path = parse_run_config([*FLAGS, "--heterogeneous-layers-config-path", str(path)])
    by_text = parse_run_config([*FLAGS, "--heterogeneous_layers_config_encoded_json", path.read_text()])
    assert by_path == by_text
    assert by_path.model.heterogeneous_layers_config_encoded_json == text
    assert read_config(own).model.blocks == BLOCKS
    write_config(by_path, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml") == by_path
    for flag, value in (("path", "absent.json"), ("path", str(own)), ("encoded-json", "{]"), ("encoded-json", "3")):
        _, faults = read_flags([*FLAGS, f"--heterogeneous-layers-config-{flag}", value])
        assert len(faults) == 1 and value in faults[0]
    own.write_text("heterogeneous_layers_config_path: absent.json\n")
    with pytest.raises(ConfigError, match=r"heterogeneous_layers_config_path=absent\.json cannot be read"):
        read_config(own)


def test_keys_of_nemotron() -> None:
    """With 8192 channels, 2/3 of 2.625 x 8192 is 14336; 2/3 of 0.1 x 8192 is 546, below 768."""
    entries = [
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"ffn_mult": 2.625}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.1, "sparsify": None}},
        {"attention": {}, "ffn": {}, "parallel_blocks": None},
    ]
    blocks, faults = read_blocks(json.dumps({"block_configs": entries}), 8192, 64)
    assert faults == ()
    assert [block.attention.size for block in blocks] == [8, None, None]
    assert [block.mlp.size for block in blocks] == [14336, 768, None]


def test_all_faults_at_once() -> None:
    entries = [{"attention": {"no_op": 3}, "mlp": {"ffn_hidden_size": -1}}, {"mlp": {"moe": {}}}]
    _, faults = read_blocks(json.dumps({"block_configs": entries}), 32, 4)
    assert len(faults) == 4


def test_flops() -> None:
    """2 for each element of a matrix; scores of 16 keys of 4 heads of 8 channels."""
    model = RunConfig.from_flat(LAYERS | {"hidden_size": 32, "num_attention_heads": 4}).model
    assert forward_flops_per_token(model, 16, 101) == {
        "qkv": 2 * 32 * ((32 + 2 * 16) + 3 * 32),
        "scores": 2 * 2 * 16 * 32,
        "values": 2 * 2 * 16 * 32,
        "output": 2 * 3 * 32 * 32,
        "mlp": 2 * 32 * (2 * 48 + 32 + 2 * 96),
        "logits": 2 * 32 * 101,
    }


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 5), st.integers(0, 20))
def test_the_most_expensive_stage_is_cheapest(costs: list[int], stages: int, output: int) -> None:
    if stages > len(costs):
        with pytest.raises(LayoutError):
            partition_by_cost(costs, stages, output)
        return

    def dearest(bounds: list[int]) -> int:
        each = [sum(costs[first:last]) for first, last in pairwise(bounds)]
        return max([*each[:-1], each[-1] + output])

    found = partition_by_cost(costs, stages, output)
    bounds = [0, *(run.stop for run in found)]
    assert [layer for run in found for layer in run] == list(range(len(costs))) and all(found)
    splits = ([0, *middle, len(costs)] for middle in combinations(range(1, len(costs)), stages - 1))
    assert dearest(bounds) == min(map(dearest, splits))


def test_stages_have_equal_flops() -> None:
    """One large layer costs as much as the others together."""
    large, small = ({"attention": {"no_op": True}, "mlp": {"ffn_hidden_size": width}} for width in (800, 100))
    text = json.dumps({"block_configs": [large] + [small] * 8})
    config = RunConfig.from_flat({"num_layers": 9, "hidden_size": 32, LAYERS_JSON: text})
    assert layers_by_stage(config, 1, 2) == [range(1), range(1, 9)]


@pytest.mark.parametrize("layout", ["tp2 sp", "tp3", "pp4", "tp6 pp2", "cp4 tp2"])
def test_small_model_fits_the_layout(layout: str) -> None:
    large = RunConfig.from_flat(NEMOTRON | {"hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 28672})
    chosen = Layout.parse(layout)
    small = configured(shrunk(large, [chosen]), chosen, "float64")
    assert list(problems(small, chosen.world_size)) == []
    kinds = {(block.attention.no_op, block.attention.linear, block.mlp.no_op) for block in small.model.blocks}
    assert kinds == {(block.attention.no_op, block.attention.linear, block.mlp.no_op) for block in BLOCKS}
