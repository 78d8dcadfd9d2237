"""Named states of random generators, and recomputation with the same numbers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron.core.tensor_parallel.random import (
    CheckpointWithoutOutput,
    CudaRNGStatesTracker,
    checkpoint,
    get_cuda_rng_tracker,
    is_checkpointing,
    model_parallel_cuda_manual_seed,
    same_random_numbers,
)
from megatron_core.errors import ConfigError


def drawn(name: str, count: int) -> Tensor:
    """The first numbers of a state, from a separate generator."""
    seeds = {"a": 11, "b": 22}
    return torch.rand(count, generator=torch.Generator().manual_seed(seeds[name]))


def test_nested_forks_draw_no_number_twice() -> None:
    tracker = CudaRNGStatesTracker()
    for name, seed in (("a", 11), ("b", 22)):
        tracker.add(name, seed)
    with tracker.fork("a"):
        parts = [torch.rand(3)]
        with tracker.fork("b"):
            others = [torch.rand(2)]
            with tracker.fork("a"):
                parts.append(torch.rand(3))
                kept = tracker.get_states()
            others.append(torch.rand(2))
        parts.append(torch.rand(3))
    with tracker.fork("a"):
        parts.append(torch.rand(3))
    assert torch.equal(torch.cat(parts), drawn("a", 12))
    assert torch.equal(torch.cat(others), drawn("b", 4))
    tracker.set_states(kept)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(6), drawn("a", 12)[6:])


def test_recomputation_within_a_fork_sees_the_same_numbers() -> None:
    model_parallel_cuda_manual_seed(5)
    tracker, seen = get_cuda_rng_tracker(), list[Tensor]()

    def noisy(x: Tensor) -> Tensor:
        with tracker.fork("expert-parallel-rng"), tracker.fork("model-parallel-rng"):
            seen.append(torch.rand(4))
        seen.append(torch.rand(4))
        assert is_checkpointing()
        return x * seen[-1] * seen[-2]

    x = torch.ones(4, requires_grad=True)
    with tracker.fork("model-parallel-rng"):
        torch.rand(4)
        y = checkpoint(noisy, False, x)
        assert not is_checkpointing()
        after = torch.rand(4)
    y.sum().backward()
    assert len(seen) == 4 and torch.equal(torch.cat(seen[:2]), torch.cat(seen[2:]))
    whole = torch.rand(16, generator=torch.Generator().manual_seed(5 + 2718))
    assert torch.equal(torch.cat([*seen[:2], after]), whole[4:])


def test_discarded_outputs_are_recomputed_with_the_same_random_numbers() -> None:
    model_parallel_cuda_manual_seed(5)
    tracker, weight = get_cuda_rng_tracker(), torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    linear, x = torch.nn.Linear(4, 5).double(), torch.randn(2, 3, dtype=torch.float64)
    calls: list[Tensor] = []

    def noisy(inputs: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        with tracker.fork():
            mask = torch.rand(4, dtype=torch.float64)
        hidden = torch.nn.functional.gelu(inputs @ weight) * mask * factor
        calls.append(hidden)
        return hidden, hidden * torch.rand(4, dtype=torch.float64)

    def run(discard: bool) -> tuple[list[Tensor], Tensor, int]:
        model_parallel_cuda_manual_seed(5)
        leaf, discarded = x.clone().requires_grad_(), CheckpointWithoutOutput()
        first, second = discarded.checkpoint(noisy, leaf, 0.5) if discard else noisy(leaf, 0.5)
        out = linear(first.reshape(1, 2, 4)).sum(0) * linear(second).sigmoid()
        if discard:
            discarded.discard_output_and_register_recompute(out)
        held = first.untyped_storage().nbytes()
        wanted = [leaf, weight, *linear.parameters()]
        for parameter in wanted[1:]:
            parameter.grad = None
        out.square().sum().backward()
        return [each.grad for each in wanted], torch.rand(3), held  # type: ignore[misc]

    gradients, after, _ = run(discard=False)
    found, after_too, held = run(discard=True)
    assert len(calls) == 3 and held == 0
    assert torch.equal(after, after_too)
    for a, b in zip(gradients, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gpus", [[], [3]])
def test_recomputation_saves_the_state_of_no_other_gpu(gpus: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    saved, restored = list[list[int]](), list[int]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(gpus))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda gpu: torch.zeros(1))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, gpu: restored.append(gpu))
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: saved.append(devices) or nullcontext())
    with same_random_numbers()():
        pass
    assert saved == [gpus] and restored == gpus


def test_outputs_that_share_the_memory_of_an_argument_are_kept() -> None:
    x, weight = torch.randn(4, 6), torch.randn(3, 6, requires_grad=True)
    for function in (lambda t: t, lambda t: t.view(2, 2, 6), lambda t: (t[:2], t.exp())):
        gradients, held = [], []
        for discard in (False, True):
            leaf, discarded = x.clone().requires_grad_(), CheckpointWithoutOutput()
            y, weight.grad = leaf * 1.0, None
            found = discarded.checkpoint(function, y) if discard else function(y)
            outputs = found if isinstance(found, tuple) else (found,)
            out = sum((torch.nn.functional.linear(each, weight).square().sum() for each in outputs), torch.zeros(()))
            if discard:
                discarded.discard_output_and_register_recompute(out)
                held = [each.untyped_storage().nbytes() for each in outputs]
            out.backward()
            gradients.append((leaf.grad, weight.grad))
        assert held == [x.nbytes, 0][: len(held)]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)


def test_outputs_that_are_not_discarded_keep_their_values() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = CheckpointWithoutOutput().checkpoint(torch.exp, x)
    (y * 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.exp(x.detach()))
    discarded = CheckpointWithoutOutput()
    with pytest.raises(ConfigError, match="call checkpoint first"):
        discarded.discard_output_and_register_recompute(y)
    with torch.no_grad():
        kept = discarded.checkpoint(torch.exp, x.detach())
        discarded.discard_output_and_register_recompute(kept * 2)
    torch.testing.assert_close(kept, torch.exp(x.detach()))
