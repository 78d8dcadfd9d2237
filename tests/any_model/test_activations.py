"""Recomputed, offloaded and compiled forwards of units: equal losses, gradients, weights and buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core.errors import ConfigError
from megatron_core.features.offload import activations as offload
from megatron_core.verify.ranks import run_ranks
from tests.any_model.models import difference, train_with_engine, train_with_torch

FULL = {"recompute_granularity": "full"}
COMPILE = {"compile": True, "compile_backend": "aot_eager"}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("tangled", {**FULL, "zero_stage": 3}),
        ("llama", {**FULL, "zero_stage": 3, "overlap_param_gather": True, "overlap_grad_reduce": True}),
        ("convolutions", {**FULL, "recompute_num_layers": 2, "zero_stage": 2}),
        ("gpt2", {**FULL, **COMPILE, "zero_stage": 3, "overlap_param_gather": True}),
        ("llama", {**COMPILE, "tensor_model_parallel_size": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_equals_torch(name: str, settings: dict[str, Any]) -> None:
    expected = train_with_torch(name)
    for result in run_ranks(2, _train, name, settings):
        assert difference(result, expected) < 1e-9


def _train(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return train_with_engine(name, **settings)


class Block(nn.Module):
    """Batch norm, dropout, and a count of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.forwards = nn.Linear(6, 6), nn.BatchNorm1d(6), 0

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        """One layer."""
        self.forwards += 1
        return torch.dropout(self.norm(self.linear(x)).tanh() + shift, 0.3, self.training)


class Stack(nn.Module):
    """Four blocks with a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """The mean square."""
        for block in self.blocks:
            x = block(x, shift=0.5)
        return x.square().mean()


def _steps(**settings: Any) -> tuple[list[float], dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    model = Stack()
    config = {"fp64": True, "micro_batch_size": 8, "global_batch_size": 8, "lr": 1e-2, **settings}
    engine = megatron_core.initialize(model, config).engine
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        engine.backward(engine(torch.randn(8, 6, dtype=torch.float64)))
        losses.append(engine.step().loss)
    return losses, engine.full_state_dict(), [block.forwards for block in model.blocks]


def test_random_numbers_and_buffers_of_recomputed_units() -> None:
    losses, state, counts = _steps()
    assert counts == [3] * 4
    for layers, expected in ((None, [6] * 4), (2, [6, 6, 3, 3])):
        again, other, counts = _steps(**FULL, recompute_num_layers=layers)
        assert counts == expected
        assert again == losses
        for name, tensor in state.items():
            assert torch.equal(other[name], tensor), name


def test_offloaded_units_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    losses, state, _ = _steps()
    moved: list[Tensor] = []
    monkeypatch.setattr(offload, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(offload, "empty_on_host", lambda tensor: moved.append(tensor) or torch.empty_like(tensor))
    again, other, _ = _steps(cpu_offloading=True, cpu_offloading_num_layers=2)
    two = len(moved)
    assert two > 0
    assert again == losses
    assert all(torch.equal(other[name], tensor) for name, tensor in state.items())
    _steps(cpu_offloading=True, cpu_offloading_num_layers=4)
    assert len(moved) == 3 * two


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recompute_granularity": "selective"}, "use recompute_granularity='full'"),
        ({"recompute_num_layers": 2}, "recompute_granularity=None with recompute_num_layers=2"),
        ({**FULL, "recompute_num_layers": 5}, "recompute_num_layers=5: the model has 4 units"),
        ({"cpu_offloading": True}, "cpu_offloading=True and cpu_offloading_num_layers=0"),
        ({"zero3_param_cpu_offload": True}, "zero3_param_cpu_offload"),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        megatron_core.initialize(Stack(), settings)
