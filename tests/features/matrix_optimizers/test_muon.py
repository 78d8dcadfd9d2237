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
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.features.matrix_optimizers.muon import newton_schulz
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
    return {name: _whole(weight.detach(), spec_of(weight)) for name, weight in layer.named_parameters()}


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


def stepped(settings: dict[str, Any]) -> dict[str, Tensor]:
    """The matrices without gate and up projection after five steps of ``TensorParallelMuon``, on every rank."""
    world = torch.distributed.get_world_size()
    parallel_state.initialize_model_parallel(world)
    layer = Layer(torch.distributed.get_rank(), world)
    named = {name: weight for name, weight in layer.named_parameters() if name != "fc1"}
    for name, weight in named.items():
        weight.partition_dim = 0 if name == "qkv" else 1  # type: ignore[attr-defined]
    groups = ProcessGroupCollection.use_mpu_process_groups()
    blocks = {"is_qkv_fn": lambda p: p is named["qkv"], "qkv_split_shapes": [4, 2, 2]}
    optimizer = TensorParallelMuon(
        named.values(), lr=0.02, weight_decay=0.1, pg_collection=groups, **(settings | blocks)
    )
    numbered = {name: phase for phase, (name, _) in enumerate(layer.named_parameters())}
    for step in range(5):
        for name, weight in named.items():
            spec, weight.grad = spec_of(weight), torch.empty_like(weight)
            spec.localise(1e-3 * numbers(spec.global_shape, 100 + 10 * step + numbered[name]), weight.grad)
        optimizer.step()
    return {name: _whole(weight.detach(), spec_of(weight)) for name, weight in named.items()}


def _whole(weight: Tensor, spec: ShardSpec) -> Tensor:
    found = torch.full(spec.global_shape, torch.nan)
    for part in spec.parts:
        found[part.whole.index] = weight[part.local.index]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizer_of_own_matrices_takes_megatrons_steps(ranks: int) -> None:
    for name, case in CASES.items():
        bound = 5e-3 if case["settings"]["fp32_matmul_prec"] == "medium" else 1e-5
        for found in run_ranks(ranks, stepped, case["settings"]):
            for key, weight in found.items():
                held, expected = ~weight.isnan(), torch.tensor(case["weights"][key]).view(SHAPES[key])
                assert held.sum() == weight.numel() // ranks
                difference = (weight - expected)[held].abs().max().item()
                assert difference < bound, f"{name}, {key}: {difference}"


def test_optimizer_of_own_matrices_checks_its_settings() -> None:
    matrix = nn.Parameter(torch.eye(4))
    for settings, message in (
        ({"coefficient_type": "cubic"}, "Unsupported muon coefficient type 'cubic'"),
        ({"num_ns_steps": 0}, "num_ns_steps must be at least 1, got 0"),
        ({"split_qkv": True}, "split_qkv=True needs is_qkv_fn and qkv_split_shapes"),
    ):
        with pytest.raises(ConfigError, match=message):
            TensorParallelMuon([matrix], **settings)
    optimizer = TensorParallelMuon([matrix], lr=0.1, weight_decay=0.5, use_decoupled_weight_decay=False, momentum=0.0)
    matrix.grad = torch.zeros(4, 4)
    optimizer.step()  # the decay is the gradient, 0.5 times the identity, whose orthogonal factor is the identity
    assert (matrix.detach() - torch.diag(matrix.detach().diagonal())).abs().max() < 1e-6
    assert 0.75 < matrix[0, 0].item() < 0.87


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
