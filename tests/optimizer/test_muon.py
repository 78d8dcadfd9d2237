"""Muon: the updates of Megatron-LM's and Emerging-Optimizers' Muon, recorded in muon_reference.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.optimizer.algorithms import newton_schulz
from megatron_core.parallel.sharding import ShardSpec, spec_of, split, split_fused, split_qkv
from megatron_core.verify.ranks import run_ranks

CASES: dict[str, Any] = json.loads(Path(__file__).with_name("muon_reference.json").read_text())["cases"]
SHAPES = {"qkv": (16, 8), "proj": (8, 8), "fc1": (24, 8), "fc2": (8, 12)}


def numbers(shape: tuple[int, ...], phase: int) -> Tensor:
    """Numbers without a pattern, computed only from integers, so that they are the same everywhere."""
    k = torch.arange(shape[0] * shape[1])
    return ((k * k * 37 + k * 101 + phase * 17) % 251 / 251.0 - 0.5).view(shape)


class Layer(nn.Module):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        specs: dict[str, ShardSpec] = {
            "qkv": split_qkv(SHAPES["qkv"], 4, 2, 2, rank, size),
            "proj": split(SHAPES["proj"], 1, rank, size),
            "fc1": split_fused(SHAPES["fc1"], (12, 12), rank, size),
            "fc2": split(SHAPES["fc2"], 1, rank, size),
        }
        for phase, (name, spec) in enumerate(specs.items()):
            weight = nn.Parameter(torch.empty(spec.local_shape))
            spec.localise(numbers(spec.global_shape, phase), weight.data)
            weight.shard_spec = spec
            self.register_parameter(name, weight)


def trained(settings: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's own parts after five steps, NaN elsewhere."""
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(world)
    layer = Layer(torch.distributed.get_rank(), world)
    ddp = DistributedDataParallel(None, DistributedDataParallelConfig(), layer)
    config = OptimizerConfig(
        "muon", lr=0.02, weight_decay=0.1, clip_grad=0.0, **{f"muon_{name}": value for name, value in settings.items()}
    )
    optimizer = get_megatron_optimizer(config, [ddp])
    for step in range(5):
        for phase, weight in enumerate(layer.parameters()):
            spec = spec_of(weight)
            spec.localise(1e-3 * numbers(spec.global_shape, 100 + 10 * step + phase), weight.main_grad)
        optimizer.step()
    found = {}
    for name, weight in layer.named_parameters():
        found[name] = torch.full(spec_of(weight).global_shape, torch.nan)
        for part in spec_of(weight).parts:
            found[name][part.whole.index] = weight.detach()[part.local.index]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_five_steps_are_megatrons(ranks: int) -> None:
    """With 4 ranks two of them share the keys and values of a group."""
    for name, case in CASES.items():
        expected = {key: torch.tensor(values).view(SHAPES[key]) for key, values in case["weights"].items()}
        # bfloat16 rounds sums, whose order depends on the machine; an update of 5 steps is 0.3 to 0.5.
        bound = 5e-3 if case["settings"]["fp32_matmul_prec"] == "medium" else 1e-5
        for found in run_ranks(ranks, trained, case["settings"]):
            for key, weight in found.items():
                held = ~weight.isnan()
                assert held.sum() >= weight.numel() // ranks
                difference = (weight - expected[key])[held].abs().max().item()
                assert difference < bound, f"{name}, {key}: {difference}"


@pytest.mark.parametrize("kind", ["simple", "quintic", "polar_express"])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (3, 6, 6)])
def test_newton_schulz_keeps_directions_and_levels_lengths(shape: tuple[int, ...], kind: str) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = left.mT @ newton_schulz(matrix, 5, kind) @ right.mT
    lengths = found.diagonal(dim1=-2, dim2=-1)
    assert lengths.min() > 0.4 and lengths.max() < 1.3
    torch.testing.assert_close(found, torch.diag_embed(lengths), rtol=0, atol=1e-10)


@pytest.mark.parametrize("setting", [{"muon_tp_mode": "blockwise"}, {"muon_scale_mode": "none"}])
def test_other_modes_are_refused(setting: dict[str, str]) -> None:
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=f"{name}='{value}' is not supported; legal: "):
        OptimizerConfig("muon", lr=0.1, **setting).translated()  # type: ignore[arg-type]
