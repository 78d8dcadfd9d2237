"""Tiny runs for tests: a configuration, and a run in this process or in a forked rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.setup import Run, set_up
from megatron_core.transformer.layer_spec import LayerSpecs, layer_spec

TINY = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_length": 16,
    "vocab_size": 61,
    "mock_data": True,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 8,
    "make_vocab_size_divisible_by": 8,
    "lr": 1e-2,
}


def tiny_config(**settings: object) -> RunConfig:
    """A configuration that trains in milliseconds."""
    return RunConfig.from_flat(TINY | settings)


def tiny_run(layer_specs: LayerSpecs = layer_spec, **settings: object) -> Run:
    """The run of ``tiny_config`` on this rank."""
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return set_up(
        tiny_config(**settings), World(*ranks, local_rank=0, device=torch.device("cpu")), layer_specs=layer_specs
    )
