"""Copies of the trained weights: what is sent again, and memory that a program has exchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.parallel.boxes import Box
from megatron_core.post_training import (
    RolloutSampler,
    Trainer,
    Trajectory,
    largest_difference,
    objectives,
    weights,
)
from megatron_core.verify.ranks import run_ranks, this_world
from tests.runs import TINY

SMALL: dict[str, Any] = {"mock_data": False, "seq_length": 32, "position_embedding_type": "rope", "lr": 0.01}


def _config(**settings: Any) -> RunConfig:
    return RunConfig.from_flat(TINY | SMALL | settings)


def _updates(config: RunConfig) -> tuple[list[int], list[float]]:
    """Received bytes and differences from the trainer, of the first copy and after each of two steps."""
    trainer = Trainer(config, this_world())
    sampler = RolloutSampler(trainer)
    received = [sampler._transfer.run()]
    differences = []
    for step in range(3):
        answers = [group[0] for group in sampler.sample([[1, 2], [3]], max_new_tokens=6, seed=step)]
        pairs = zip(([1, 2], [3]), answers, strict=True)
        texts = [Trajectory.of_answer(prompt, answer.tokens) for prompt, answer in pairs]
        differences.append(largest_difference(answers, trainer.log_probs(texts).log_probs))
        trainer.train_on(texts, objectives.cross_entropy())
        received.append(sampler.update_weights())
    return received, differences


@pytest.mark.parametrize("layout", [{"pipeline_model_parallel_size": 2}, {"zero_stage": 3}])
def test_frozen_weights_are_sent_once(layout: dict[str, Any]) -> None:
    """The first copy is that of the constructor: the bytes of later ones are those of the adapters."""
    adapters = run_ranks(2, _updates, _config(lora_rank=2, fp64=True, **layout))
    whole = run_ranks(2, _updates, _config(fp64=True, **layout))
    for (received, differences), (of_all, _) in zip(adapters, whole, strict=True):
        assert len(set(of_all)) == 1
        assert 0 < max(received) < 0.25 * of_all[0]
        assert max(differences) < 1e-12


def test_exchanged_memory_is_copied() -> None:
    trainer = Trainer(_config())
    sampler = RolloutSampler(trainer)
    parameter = trainer.run.stages[0].decoder.final_layernorm.weight
    parameter.data = torch.full_like(parameter.data, 3.0)
    sampler.update_weights()
    assert any(torch.equal(copied, parameter) for copied in sampler.parameters())


def _copied(settings: dict[str, Any], layout: dict[str, int]) -> tuple[list[Any], int]:
    """The sampler's weights after a step and the messages of this rank's updates."""
    trainer = Trainer(_config(**settings), this_world())
    sampler = RolloutSampler(trainer, **layout)
    sent = 0
    exchange = torch.distributed.batch_isend_irecv

    def counted(operations: list[Any]) -> list[Any]:
        nonlocal sent
        sent += len(operations)
        return exchange(operations)

    torch.distributed.batch_isend_irecv = counted
    trainer.train_on([Trajectory.of_answer([1, 2], [3, 4, 5])], objectives.cross_entropy())
    sampler.update_weights()
    return [parameter.numpy() for parameter in sampler.parameters()], sent


@pytest.mark.parametrize(
    ("ranks", "settings", "layout"),
    [
        (2, {"zero_stage": 3}, {}),
        (2, {"pipeline_model_parallel_size": 2}, {"tensor_parallel": 2}),
        # The second rank has the smaller stage, and writes the tied embedding of both.
        (2, {"pipeline_model_parallel_size": 2, "num_layers": 4, "decoder_first_pipeline_num_layers": 3}, {}),
        (4, {"tensor_model_parallel_size": 2, "zero_stage": 2}, {"pipeline_parallel": 2}),
    ],
)
def test_ranks_of_a_host_write_without_messages(
    ranks: int, settings: dict[str, Any], layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LARGE", 1024)
    shared = run_ranks(ranks, _copied, settings | {"fp64": True}, layout)
    messages = run_ranks(ranks, _copied, settings | {"fp64": True}, layout, backend="gloo")
    assert sum(sent for _, sent in shared) == 0 < sum(sent for _, sent in messages)
    for (written, _), (received, _) in zip(shared, messages, strict=True):
        for one, other in zip(written, received, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_boxes_are_handed_to_idle_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "LARGE", 10)
    sizes = {"tiny": 9, "small": 10, "large": 50, "larger": 70}
    boxes = {name: [Box((0,), (size,))] for name, size in sizes.items()}
    kept = [boxes, boxes, boxes, {"small": boxes["small"]}]

    def handed(loads: list[int], hosts: list[int]) -> list[tuple[str, int, int]]:
        return [(move.name, busy, idle) for move, busy, idle in weights._handed_over(kept, loads, hosts)]

    # 70 would make rank 1 the busiest; after 50 rank 1 has 180, rank 0 150 and rank 3 none.
    assert handed([200, 130, 90, 0], [0, 0, 2, 0]) == [("large", 0, 1), ("small", 1, 3), ("small", 0, 3)]
    assert handed([200, 130, 90, 0], [0, 1, 2, 3]) == []
    assert handed([100, 100, 100, 100], [0, 0, 0, 0]) == []
