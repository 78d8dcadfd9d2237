"""Initial weights are a function of (seed, name, element), for any part drawn by a rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from megatron_core.features.device_draws import draws as device_draws
from megatron_core.parallel import initialization as module
from megatron_core.parallel.boxes import Box
from megatron_core.parallel.initialization import CHUNK, Normal, initialise, initialise_by_name, name_seed
from megatron_core.parallel.sharding import ShardSpec, allocate, replicated, split
from tests.parallel.specs import ANY_SPLIT
from tests.simulated_gpu.runtime import simulated_gpu

METHODS = [Normal(0.5), nn.init.ones_, lambda full: full.copy_(torch.arange(full.numel()).view(full.shape))]


@settings(deadline=None, max_examples=40)
@given(ANY_SPLIT)
def test_parts_are_drawn_from_one_tensor(specs: list[ShardSpec]) -> None:
    """The state of random generators does not change."""
    state = torch.get_rng_state()
    for method in METHODS:
        whole = allocate(replicated(specs[0].global_shape), torch.float64, "cpu")
        initialise_by_name(whole, method, 1, "decoder.weight")
        for spec in specs:
            part, expected = allocate(spec, torch.float64, "cpu"), torch.empty(spec.local_shape, dtype=torch.float64)
            part.data.fill_(torch.nan)
            initialise_by_name(part, method, 1, "decoder.weight")
            spec.localise(whole.data, expected)
            assert torch.equal(part.data, expected)
    assert torch.equal(torch.get_rng_state(), state)


def test_chunks_join() -> None:
    """Long runs of rows and of columns, across boundaries of chunks and of Philox counters."""
    shape = (259, 1003)
    assert shape[0] * shape[1] > 3 * CHUNK
    whole = allocate(replicated(shape), torch.float32, "cpu")
    initialise_by_name(whole, Normal(1.0), 3, "w")
    for dim in (0, 1):
        size = 7 if dim == 0 else 17
        parts = [allocate(split(shape, dim, i, size), torch.float32, "cpu") for i in range(size)]
        for part in parts:
            initialise_by_name(part, Normal(1.0), 3, "w")
        assert torch.equal(torch.cat([part.data for part in parts], dim), whole.data)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((40000,), Box((0,), (40000,))),
        ((40003,), Box((7,), (39999,))),
        ((259, 1003), Box((0, 0), (259, 1003))),
        ((256, 1024), Box((0, 256), (256, 512))),
        ((4, 64, 48), Box((1, 3, 8), (3, 64, 40))),
        ((4, 64, 48), Box((1, 3, 8), (3, 64, 44))),
    ],
)
def test_operators_of_torch_draw_the_same_bits(
    shape: tuple[int, ...], box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draws on GPUs: parts of counters, of rows and of columns, across the boundary of a chunk."""
    monkeypatch.setattr(device_draws, "COUNTERS", 1000)
    found = torch.full((box.numel,), torch.nan, dtype=torch.float32)
    device_draws.fill_normal(found, box, shape, name_seed(3, "w"), 0.02)
    expected = Normal(0.02).draw(name_seed(3, "w"), list(box.flat_ranges(shape)))
    assert np.array_equal(found.numpy(), expected)


def test_a_gpu_draws_weights_itself() -> None:
    """The whole tensor and a part of its columns on a simulated GPU."""
    expected = allocate(replicated((64, 320)), torch.bfloat16, "cpu")
    initialise_by_name(expected, Normal(0.02), 3, "w")
    with simulated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ON_GPU", 4096)
        patch.setattr(Normal, "draw", lambda *_: pytest.fail("drawn on the CPU"))
        patch.setattr(module, "draws_alike", lambda device: True)
        for spec in (replicated((64, 320)), split((64, 320), 1, 2, 4)):
            part = allocate(spec, torch.bfloat16, "cuda")
            initialise_by_name(part, Normal(0.02), 3, "w")
            wanted = torch.empty(spec.local_shape, dtype=torch.bfloat16, device="cpu")
            spec.localise(expected.data, wanted)
            assert torch.equal(part.data.cpu(), wanted)


def test_a_device_that_rounds_differently_does_not_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.draws_alike.__wrapped__(torch.device("cpu"))
    real = device_draws._cosine
    monkeypatch.setattr(device_draws, "_cosine", lambda turns: real(turns) * (1 + 2**-23))
    with pytest.warns(UserWarning, match="rounds differently from a CPU: initial weights are drawn on the CPU"):
        assert not module.draws_alike.__wrapped__(torch.device("cpu"))


def test_distribution() -> None:
    """N(0, std): moments within four standard errors, and the shares beyond 1, 2, 3, 4 of them."""
    std, n = 0.02, 2_000_000
    x = Normal(std).draw(name_seed(5, "w"), [(0, n)]).astype(np.float64) / std
    for power, (mean, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs((x**power).mean() - mean) < 4 * np.sqrt(variance / n), power
    for bound, share in {1: 0.317311, 2: 0.0455003, 3: 0.0026998, 4: 6.334e-5}.items():
        assert abs((np.abs(x) > bound).mean() - share) < 4 * np.sqrt(share / n), bound
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / np.sqrt(n)


def test_first_values_never_change() -> None:
    """Any release, machine and numpy draw the same weights: here by hand from Philox."""
    words = np.random.Philox(key=name_seed(1234, "w")).random_raw(2)
    u = ((words >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
    angle = 2 * np.pi * (words & np.uint64(2**32 - 1)).astype(np.float64) * 2.0**-32
    expected = np.sqrt(-2 * np.log(u)) * np.array([np.cos(angle), np.sin(angle)])
    np.testing.assert_allclose(Normal(1.0).draw(name_seed(1234, "w"), [(0, 4)]), expected.T.ravel(), atol=2e-5)


def test_values_depend_on_seed_and_name() -> None:
    seeds = [name_seed(seed, name) for seed in (1, 2, 12) for name in ("a", "b", "2:a")]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    drawn = {tuple(Normal(1.0).draw(seed, [(0, 4)])) for seed in seeds}
    assert len(drawn) == len(seeds)


@pytest.mark.parametrize("index", [0, 1])
def test_layers_alone_draw_from_the_shared_generator(index: int) -> None:
    """As in Megatron: ranks with the same seed hold parts of one tensor."""
    torch.manual_seed(7)
    part = allocate(split((8, 3), 0, index, 2), torch.float64, "cpu")
    initialise(part, Normal(0.02))
    torch.manual_seed(7)
    expected = nn.init.normal_(torch.empty(8, 3), std=0.02)[4 * index :][:4]
    assert torch.equal(part.data, expected.double())
