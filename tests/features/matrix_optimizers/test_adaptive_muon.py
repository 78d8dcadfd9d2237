"""AdaMuon and NorMuon: the updates of Emerging-Optimizers, the formula, and the second moment in checkpoints."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_core import parallel_state
from megatron_core.checkpoint import CheckpointReader
from megatron_core.config import OptimizerConfig
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.matrix_optimizers.muon import AdaMuon, newton_schulz
from megatron_core.optimizer.rule import Rates
from megatron_core.parallel.sharding import Fused
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

REFERENCE: dict[str, Any] = json.loads(Path(__file__).with_name("adaptive_muon_reference.json").read_text())
CASES = REFERENCE["cases"]
SHAPES = {"wide": (8, 12), "square": (8, 8), "tall": (24, 8)}
METHODS = ("adamuon", "normuon")


def numbers(shape: tuple[int, ...], phase: int) -> Tensor:
    """Numbers without a pattern, computed only from integers, so that they are the same everywhere."""
    k = torch.arange(shape[0] * shape[1])
    return ((k * k * 37 + k * 101 + phase * 17) % 251 / 251.0 - 0.5).view(shape)


def stepped(settings: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's rows, or columns of the wide matrix, after five steps."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    parallel_state.initialize_model_parallel(world)
    named: dict[str, Any] = {}
    for phase, (name, shape) in enumerate(SHAPES.items()):
        dim = int(name == "wide")
        named[name] = nn.Parameter(numbers(shape, phase).chunk(world, dim)[rank].clone())
        named[name].partition_dim = dim
    groups = ProcessGroupCollection.use_mpu_process_groups()
    optimizer = TensorParallelAdaptiveMuon(named.values(), lr=0.02, weight_decay=0.1, pg_collection=groups, **settings)
    for step in range(5):
        for phase, (name, weight) in enumerate(named.items()):
            whole = 1e-3 * numbers(SHAPES[name], 100 + 10 * step + phase)
            weight.grad = whole.chunk(world, weight.partition_dim)[rank].clone()
        optimizer.step()
    return {name: weight.detach() for name, weight in named.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_five_steps_are_those_of_emerging_optimizers(ranks: int) -> None:
    for name, case in CASES.items():
        parts = run_ranks(ranks, stepped, case["settings"])
        for key, shape in SHAPES.items():
            found = torch.cat([part[key] for part in parts], dim=int(key == "wide"))
            torch.testing.assert_close(
                found, torch.tensor(case["weights"][key]).view(shape), rtol=0, atol=2e-5, msg=f"{name}, {key}"
            )


def test_five_steps_of_fused_queries_keys_and_values_are_megatrons() -> None:
    weight = nn.Parameter(numbers((16, 8), 0))
    optimizer = TensorParallelAdaptiveMuon(
        [weight], 0.02, 0.9, False, 0.1, split_qkv=True, is_qkv_fn=lambda p: True, qkv_split_shapes=[4, 2, 2],
        fp32_matmul_prec="highest",
    )  # fmt: skip
    for step in range(5):
        weight.grad = 1e-3 * numbers((16, 8), 100 + 10 * step)
        optimizer.step()
    expected = torch.tensor(REFERENCE["qkv of Megatron-LM"]).view(16, 8)
    torch.testing.assert_close(weight.detach(), expected, rtol=0, atol=2e-5)


def rule(**settings: Any) -> AdaMuon:
    return AdaMuon(OptimizerConfig(optimizer="adaptive_muon", muon_extra_scale_factor=0.2, **settings))


def by_formula(directions: list[Tensor], blocks: list[list[int]], method: str) -> list[Tensor]:
    """The updates of one matrix, row by row; each of ``blocks`` has the rows that are orthogonalized together."""
    rows, columns = directions[0].shape
    v, updates = torch.zeros(rows, columns, dtype=torch.float64), []
    for direction in directions:
        o = torch.empty_like(direction)
        for block in blocks:
            o[block] = newton_schulz(direction[block], 5)
        if method == "adamuon":
            v = 0.9 * v + 0.1 * o**2
            u = o / (v**0.5 + 1e-8)
        else:
            means = o**2 @ torch.full((columns, columns), 1 / columns).double()
            if rows < columns:
                means = torch.full((rows, rows), 1 / rows).double() @ o**2
            v = 0.9 * v + 0.1 * means
            u = o / v.clamp(min=1e-8) ** 0.5
            u = u * torch.linalg.matrix_norm(o) / torch.linalg.matrix_norm(u)
        updates.append(0.2 * max(rows, columns) ** 0.5 * u)
    return updates


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("shape", "fused"),
    [((7, 4), None), ((3, 4, 6), None), ((16, 5), Fused((4, 2, 2), 2)), ((6, 16), Fused((4, 1, 1), 1))],
    ids=["matrix", "experts", "qkv", "wide qkv"],
)
def test_updates_are_those_of_the_formula(shape: tuple[int, ...], fused: Fused | None, method: Any) -> None:
    """With the norm, the means and the scale of each expert, and of queries, keys and values together."""
    adaptive = rule(adaptive_muon_moment2_method=method, adaptive_muon_beta2=0.9)
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(4)]
    state = adaptive.new_state(directions[0], fused)
    found = [adaptive.transform(d.clone(), fused, state, Rates(t, 0.1, 0.0, 1.0)) for t, d in enumerate(directions, 1)]
    blocks = [list(range(shape[-2]))]
    if fused is not None:
        bounds = [sum(fused.rows[:number]) for number in range(len(fused.rows) + 1)]
        blocks = [
            [row for row in range(shape[-2]) if start <= row % bounds[-1] < stop] for start, stop in pairwise(bounds)
        ]
    for at in range(shape[0]) if len(shape) == 3 else (...,):
        expected = by_formula([direction[at] for direction in directions], blocks, method)
        for own, update in zip(found, expected, strict=True):
            torch.testing.assert_close(own[at], update, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_an_expert_without_tokens_has_no_update(method: Any) -> None:
    adaptive, directions = rule(adaptive_muon_moment2_method=method), torch.zeros(2, 4, 3)
    directions[0] = numbers((4, 3), 1)
    state = adaptive.new_state(directions, None)
    updates = adaptive.transform(directions, None, state, Rates(1, 0.1, 0.0, 1.0))
    assert updates[0].abs().min() > 0.0
    assert not updates[1].any() and not state["moment2_buffer"][1].any()


EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True, "swiglu": True}
RUN = EXPERTS | {"optimizer": "adaptive_muon", "fp64": True, "lr_decay_style": "constant"}


def losses(settings: dict[str, Any], steps: int) -> list[float]:
    run = tiny_run(**RUN, **settings)
    found = [float(train_step(run).loss) for _ in range(steps)]
    if "save" in settings:
        run.saver.save(run.state)
    return found


def stored(folder: Path) -> dict[str, Tensor]:
    (found,) = folder.glob("iter_*")
    with CheckpointReader(found) as reader:
        return {name: reader.read(name) for name in reader.manifest.tensors}


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2 ep2 zero3": {"expert_model_parallel_size": 2, "zero_stage": 3},
}


def resumed(method: str, load: str, folder: str) -> list[list[float]]:
    """The losses of two steps in each layout, which first saves the loaded state in ``folder``."""
    found = []
    for layout, settings in LAYOUTS.items():
        settings = settings | {"load": load, "adaptive_muon_moment2_method": method}
        losses(settings | {"save": f"{folder}/{layout}"}, 0)
        found.append(losses(settings, 2))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_resumes_in_another_layout(method: str, tmp_path: Path) -> None:
    """With exactly the state of the checkpoint, which another method refuses."""
    own, load = {"adaptive_muon_moment2_method": method}, tmp_path / "before"
    expected = losses(own, 4)
    assert run_ranks(2, losses, own | {"zero_stage": 1, "save": str(load)}, 2)[0] == pytest.approx(expected[:2])
    tensors = stored(load)
    assert {name.split(".")[1] for name in tensors if name.startswith("optimizer.")} >= {"moment2_buffer"}
    for found in run_ranks(2, resumed, method, str(load), str(tmp_path))[0]:
        assert found == pytest.approx(expected[2:], rel=1e-9)
    for layout in LAYOUTS:
        copied = stored(tmp_path / layout)
        assert copied.keys() == tensors.keys()
        assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items()), layout
    (other,) = set(METHODS) - {method}
    with pytest.raises(CheckpointError, match=r"moment2_buffer.* has the shape .*use the settings with which"):
        losses({"load": str(load), "adaptive_muon_moment2_method": other}, 0)


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(ConfigError, match="moment2_method='namo' is not supported; use adamuon or normuon"):
        TensorParallelAdaptiveMuon([nn.Parameter(torch.eye(4))], moment2_method="namo")
