"""Loading checkpoints of similar models with ``strict=False`` against ``load_state_dict`` of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_core
from megatron_core.any_model import Engine
from megatron_core.checkpoint import CheckpointReader, find_checkpoint
from megatron_core.errors import CheckpointError
from megatron_core.verify.ranks import run_ranks

CONFIG: dict[str, Any] = {"fp64": True, "micro_batch_size": 2, "lr": 1e-2}


class Net(nn.Module):
    """Layers with names, and running statistics."""

    def __init__(self, *names: str, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(len(names[-1]))
        self.layers = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the last output."""
        for layer in self.layers.values():
            x = layer(x)
        return self.norm(x).square().mean()


def _engine(model: nn.Module, **settings: Any) -> Engine:
    engine = megatron_core.initialize(model, {**CONFIG, **settings}).engine
    for number in range(2):
        engine.backward(engine(torch.randn(2, 4, generator=torch.Generator().manual_seed(number)).double()))
        engine.step()
    return engine


def _load(folder: str, settings: dict[str, Any]) -> None:
    saved = _engine(Net("first", "second"), **settings)
    saved.save_checkpoint(folder)
    other = _engine(Net("first", "third_layer"), **settings)
    expected = Net("first", "third_layer").double()
    expected.load_state_dict(other.full_state_dict())
    expected.load_state_dict(saved.full_state_dict(), strict=False)
    with pytest.raises(CheckpointError, match="missing"):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, strict=False)
    for name, tensor in other.full_state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name
    pairs = zip(saved.module.layers["first"].parameters(), other.module.layers["first"].parameters(), strict=True)
    for parameter, loaded in pairs:  # with its moments
        for state in ("exp_avg", "exp_avg_sq"):
            whole, again = (e.whole.state(p, state) for e, p in ((saved, parameter), (other, loaded)))
            assert torch.equal(whole, again)


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}])
def test_common_tensors_are_those_that_torch_loads(settings: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(2, _load, str(tmp_path), settings)


def _load_trained_only(folder: str, settings: dict[str, Any]) -> None:
    def construct() -> Engine:
        model = Net("first", "second")
        model.layers["second"].requires_grad_(False)
        return _engine(model, **settings)

    saved = construct()
    saved.save_checkpoint(folder, trained_only=True)
    with CheckpointReader(find_checkpoint(folder)) as reader:
        stored = {name.removeprefix("model.") for name in reader.manifest.tensors if name.startswith("model.")}
    trained = {name for name, parameter in saved.module.named_parameters() if parameter.requires_grad}
    assert stored == trained
    other = construct()
    base = other.module.layers["second"]
    with other.gathered(base.parameters(), modify=True), torch.no_grad():
        base.weight.add_(1)  # as of another base
    with pytest.raises(CheckpointError, match=r"missing.*layers\.second"):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, strict=False)
    expected = saved.full_state_dict()
    expected["layers.second.weight"] += 1
    for name, tensor in other.full_state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    saved.save_checkpoint(folder + "/whole")  # the next checkpoint has all weights again
    other.load_checkpoint(folder + "/whole")


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}])
def test_a_checkpoint_without_frozen_weights(settings: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(2, _load_trained_only, str(tmp_path), settings)


def test_checkpoints_without_a_common_weight_or_of_another_shape(tmp_path: Path) -> None:
    _engine(Net("first")).save_checkpoint(tmp_path)
    for model, message in ((nn.Linear(4, 1), "has no weight of this model"), (Net("first", width=6), "has the shape")):
        engine = megatron_core.initialize(model, {**CONFIG}).engine
        with pytest.raises(CheckpointError, match=message):
            engine.load_checkpoint(tmp_path, strict=False)
    rmsprop = megatron_core.initialize(Net("first"), CONFIG, optimizer=torch.optim.RMSprop).engine
    with pytest.raises(CheckpointError, match="strict=False with an optimizer of torch"):
        rmsprop.load_checkpoint(tmp_path, strict=False)
    rmsprop.load_checkpoint(tmp_path, strict=False, load_optimizer=False)
