"""Megatron Core's configuration of layers of different sizes, over the engine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args, parse_args
from megatron_core.errors import ConfigError
from megatron_core.models import gpt
from tests.parity.heterogeneous_rows import BLOCKS, LAYERS

JSON = LAYERS["heterogeneous_layers_config_encoded_json"]
SHAPE = {
    "num_layers": len(BLOCKS),
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "params_dtype": torch.float64,
}


def _config(path: Path, **changes: Any) -> HeterogeneousTransformerConfig:
    path.write_text(json.dumps(json.loads(str(JSON)), indent=2))
    return HeterogeneousTransformerConfig(**SHAPE | changes, heterogeneous_layers_config_path=str(path))


def test_model_is_the_engines(tmp_path: Path) -> None:
    config = _config(tmp_path / "layers.json")
    model_parallel_cuda_manual_seed(1234)
    theirs = GPTModel(
        config,
        get_gpt_heterogeneous_layer_spec(config),
        vocab_size=61,
        max_sequence_length=8,
        share_embeddings_and_output_weights=True,
    )
    own = config.model_config(make_vocab_size_divisible_by=1, max_position_embeddings=8)
    ours = gpt.model.GPTModel(own, 61, 8, parallel=config.parallel_options(), seed=1234)
    assert own.blocks == BLOCKS
    shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
    assert {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()} == shapes
    ids = torch.arange(16).view(2, 8)
    assert torch.equal(theirs(ids, None, None), ours(ids))


def test_arguments_select_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-LM's programs read the name of the file, also in models whose layers are equal."""
    path = tmp_path / "layers.json"
    path.write_text(str(JSON))
    flags = ["x", "--num-layers", "5", "--hidden-size", "32", "--mock-data", "--train-iters", "1"]
    monkeypatch.setattr("sys.argv", flags)
    plain = parse_args()
    assert plain.heterogeneous_layers_config_path is None
    assert type(core_transformer_config_from_args(plain)) is TransformerConfig
    monkeypatch.setattr("sys.argv", [*flags, "--heterogeneous-layers-config-path", str(path)])
    args = parse_args()
    assert args.heterogeneous_layers_config_path is not None
    config = core_transformer_config_from_args(args)
    assert isinstance(config, HeterogeneousTransformerConfig) and config.model_config().blocks == BLOCKS


def test_configurations_of_layers(tmp_path: Path) -> None:
    config = _config(tmp_path / "layers.json")
    first, last = config.get_config_for_layer(1), config.get_config_for_layer(5)
    assert (first.num_query_groups, first.ffn_hidden_size) == (2, 48)
    assert (last.num_query_groups, last.ffn_hidden_size) == (4, 128)
    assert config.per_block_parameters[1].mlp.replace_with_linear and config.per_block_parameters[1].attention.no_op
    with pytest.raises(ValueError, match="layer_number=6 must be from 1 to 5"):
        config.get_config_for_layer(6)


def test_faults(tmp_path: Path) -> None:
    config = _config(tmp_path / "layers.json")
    with pytest.raises(ConfigError, match="has 5 layers, but num_layers=4"):
        _config(tmp_path / "layers.json", num_layers=4)
    with pytest.raises(ConfigError, match=r"heterogeneous_layers_config_path=absent\.json cannot be read"):
        HeterogeneousTransformerConfig(**SHAPE, heterogeneous_layers_config_path="absent.json")
    with pytest.raises(ConfigError, match=r"layer 1: mlp=.*LinearReplacement in heterogeneous_layers_config"):
        GPTModel(config, get_gpt_layer_local_spec(), vocab_size=61, max_sequence_length=8)
