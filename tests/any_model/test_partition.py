"""Division of layers into stages: the formulas, and boundaries that DeepSpeed 0.19.8 computes."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from megatron_core import LayerSpec, PipelineModule
from megatron_core.any_model.partition import balanced_bounds, uniform_bounds
from megatron_core.config.partition import partition_by_cost
from megatron_core.errors import ConfigError, LayoutError


class A(nn.Linear):
    """A layer with a matrix."""


class B(nn.LayerNorm):
    """A layer without one."""


# Layers (class, width), and the boundaries of DeepSpeed's PipelineModule by method and number of stages.
LAYERS = [[(A, 8), (A, 9), (A, 6), (B, 24), (A, 5), (A, 6), (A, 3), (B, 18), (B, 36), (B, 40), (B, 21)]]
LAYERS += [[(A, 3), (A, 9), (B, 32), (B, 15), (A, 2), (B, 26)]]
LAYERS += [[(B, 5), (A, 7), (B, 21), (A, 5), (B, 39), (B, 29), (B, 34), (B, 36), (B, 34), (A, 2), (B, 25)]]
OF_DEEPSPEED = [
    (LAYERS[0], 2, "uniform", [0, 6, 11]),
    (LAYERS[0], 2, "parameters", [0, 5, 11]),
    (LAYERS[1], 3, "parameters", [0, 2, 3, 6]),
    (LAYERS[2], 3, "type:a", [0, 3, 9, 11]),
    (LAYERS[2], 3, "uniform", [0, 4, 8, 11]),
]


@pytest.mark.parametrize(("layers", "stages", "method", "bounds"), OF_DEEPSPEED)
def test_boundaries_are_those_of_deepspeed(
    layers: list[tuple[type[nn.Module], int]], stages: int, method: str, bounds: list[int]
) -> None:
    specs = [LayerSpec(A, width, width) if kind is A else LayerSpec(B, width) for kind, width in layers]
    found = PipelineModule(specs, partition_method=method).divide(stages)
    assert [0, *(each.stop for each in found)] == bounds


def _all_divisions(count: int, stages: int) -> list[list[int]]:
    return [[0, *inner, count] for inner in combinations(range(1, count), stages - 1)]


def _sums(costs: list[int], bounds: list[int]) -> list[int]:
    return [sum(costs[a:b]) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("seed", range(20))
def test_formulas_against_all_divisions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(9, (7,), generator=generator).tolist()
    for stages in (1, 2, 3, 4):
        divisions = _all_divisions(7, stages)
        fastest = [0, *(stage.stop for stage in partition_by_cost(costs, stages))]
        assert max(_sums(costs, fastest)) == min(max(_sums(costs, each)) for each in divisions)
        sizes = _sums([1] * 7, uniform_bounds(7, stages))
        assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
    spread = [max(found) - min(found) for found in (_sums(costs, each) for each in _all_divisions(7, 2))]
    two = _sums(costs, balanced_bounds(weights=costs, num_parts=2))
    assert max(two) - min(two) == min(spread)  # exact for two stages


def test_division_by_flops() -> None:
    """An embedding has most parameters and no FLOPs; a wide pair of layers has most FLOPs."""
    layers = [LayerSpec(nn.Embedding, 500, 4), *(LayerSpec(nn.Linear, 4, 4) for _ in range(5))]
    layers += [LayerSpec(nn.Linear, 4, 40), LayerSpec(nn.Linear, 40, 4)]
    example = torch.zeros(2, 3, dtype=torch.int64)
    model = PipelineModule(layers, partition_method="flops", example=example)
    assert model.flops() == [0, *[2 * 6 * 16] * 5, 2 * 6 * 160, 2 * 6 * 160]
    assert [each.stop for each in model.divide(2)] == [7, 8]
    assert [each.stop for each in PipelineModule(layers).divide(2)] == [1, 8]
    assert not list(model.parameters())


@pytest.mark.parametrize(
    ("method", "error", "text"),
    [
        ("fast", ConfigError, "partition_method='fast' is unknown"),
        ("flops", ConfigError, "needs example="),
        ("type:(", ConfigError, "correct the regular expression"),
        ("type:conv", ConfigError, "matches no layer"),
        ([1, 1], LayoutError, r"must have one number >= 1 for each of 2 stages, 3 in all"),
    ],
)
def test_refusals(method: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        PipelineModule([LayerSpec(nn.Linear, 2, 2)] * 3, partition_method=method).divide(2)


def test_fewer_layers_than_stages() -> None:
    with pytest.raises(LayoutError, match="3 layers, fewer than its 4 pipeline stages"):
        PipelineModule([LayerSpec(nn.Linear, 2, 2)] * 3).divide(4)
