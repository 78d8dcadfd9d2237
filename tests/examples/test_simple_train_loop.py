"""The example of a custom training loop with Megatron Core's imports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from examples import simple_train_loop as example
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron_core.parallel.sharding import spec_of
from megatron_core.verify.ranks import run_ranks

STEPS = 3
Part = tuple[str, tuple[slice, ...], np.ndarray]


def trained(tensor: int, pipeline: int, steps: int = STEPS) -> tuple[list[float], list[Part]]:
    """Losses, and this rank's parts of the last step's gradients in float64."""
    example.initialize_distributed(tensor, pipeline)
    model = example.model_provider(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = example.train(model, example.get_train_data_iterator(), steps, optimizer)
    parameters = dict(model.module.named_parameters())
    parts = []
    for name, shard in model.sharded_state_dict().items():
        grad = parameters[name].grad
        assert grad is not None, f"{name}: an optimizer of torch would not train it"
        for part in spec_of(parameters[name]).parts:
            parts.append((shard.key, part.whole.index, grad[part.local.index].numpy().copy()))
    return losses, parts


@pytest.fixture(scope="module")
def alone() -> Any:
    return run_ranks(1, trained, 1, 1)[0]


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (1, 1)], ids=["tp2", "pp2", "dp2"])
def test_losses_and_gradients_are_those_of_one_process(alone: Any, tensor: int, pipeline: int) -> None:
    losses, parts = alone
    whole = {name: grad for name, _, grad in parts}
    ranks = run_ranks(2, trained, tensor, pipeline)
    found = [own for own, _ in ranks if own]
    for own in found:
        np.testing.assert_allclose(own, losses, rtol=0, atol=1e-9)
    assert found
    assert {name for _, own in ranks for name, _, _ in own} == set(whole)
    for _, own in ranks:
        for name, where, grad in own:
            np.testing.assert_allclose(grad, whole[name][where], rtol=0, atol=1e-9, err_msg=name)


def test_the_loss_falls() -> None:
    losses, _ = run_ranks(2, trained, 2, 1, 20)[0]
    assert losses[-1] < losses[0] / 2


def test_a_part_describes_itself_as_megatron_does() -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4), (1, 2, 5))
    assert (shard.global_shape, shard.global_offset) == ((3, 20), (0, 8))
    assert (shard.axis_fragmentations, shard.local_shape) == ((1, 5), (3, 4))
