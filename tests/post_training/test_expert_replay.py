"""Experts that were chosen in a rollout are replayed in training, in every layout."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.experts.replay import RouterReplay
from megatron_core.post_training import RolloutSampler, Trainer, Trajectory, objectives
from megatron_core.transformer.context import ForwardState
from megatron_core.verify.ranks import run_ranks, this_world
from tests.runs import TINY

SETTINGS = TINY | {
    "mock_data": False,
    "seq_length": 32,
    "position_embedding_type": "rope",
    "lr_decay_style": "constant",
    "num_layers": 3,
    "num_experts": 4,
    "moe_layer_freq": (1, 0, 1),
    "moe_router_topk": 2,
    "fp64": True,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3, recomputation": {
        "zero_stage": 3,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def _config(**settings: Any) -> RunConfig:
    return RunConfig.from_flat(SETTINGS | settings)


def _recorded() -> list[Trajectory]:
    """Texts with drawn experts, which the routers would not choose."""
    draw = random.Random(3)
    trajectories = []
    for _ in range(7):
        prompt = [draw.randrange(61) for _ in range(draw.randrange(1, 6))]
        answer = [draw.randrange(61) for _ in range(draw.randrange(1, 9))]
        positions = len(prompt) + len(answer) - 1
        experts = np.array([[draw.sample(range(4), 2) for _ in range(2)] for _ in range(positions)], dtype=np.uint8)
        trajectories.append(Trajectory.of_answer(prompt, answer, experts=experts, advantages=draw.gauss(0, 1)))
    return trajectories


def _trained(config: RunConfig) -> tuple[np.ndarray, list[tuple[float, float]], np.ndarray]:
    trainer = Trainer(config, this_world())
    before = torch.cat(trainer.log_probs(_recorded()).log_probs).numpy()
    steps = [trainer.train_on(_recorded(), objectives.reinforce()) for _ in range(2)]
    after = torch.cat(trainer.log_probs(_recorded()).log_probs).numpy()
    return before, [(step.loss, step.grad_norm) for step in steps], after


def _direct(config: RunConfig) -> np.ndarray:
    """Log-probabilities of each text alone, by a forward of the model with its experts."""
    trainer = Trainer(config, this_world())
    (model,) = trainer.run.stages.values()
    rows = []
    for trajectory in _recorded():
        assert trajectory.experts is not None
        experts = torch.from_numpy(trajectory.experts.astype(np.int64))[:, None]
        replay = RouterReplay({0: experts[:, :, 0], 2: experts[:, :, 1]})
        ids = torch.tensor([trajectory.tokens])
        with torch.no_grad():
            logits = model(ids[:, :-1], state=ForwardState(router_replay=replay))[0]
        scores = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        rows.append(scores[torch.tensor(trajectory.mask) > 0])
    return torch.cat(rows).numpy()


@pytest.fixture(scope="module")
def alone() -> tuple[Any, ...]:
    return run_ranks(1, _trained, _config())[0]


def test_replayed_experts_are_those_of_a_direct_forward(alone: tuple[Any, ...]) -> None:
    (direct,) = run_ranks(1, _direct, _config())
    np.testing.assert_allclose(alone[0], direct, rtol=1e-12)
    (chosen,) = run_ranks(1, _scores_without_record, _config())
    assert np.abs(chosen - direct).max() > 1e-4


def _scores_without_record(config: RunConfig) -> np.ndarray:
    trajectories = [Trajectory(t.tokens, t.mask) for t in _recorded()]
    return torch.cat(Trainer(config, this_world()).log_probs(trajectories).log_probs).numpy()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one process"])
def test_layouts_replay_as_one_process(layout: str, alone: tuple[Any, ...]) -> None:
    for before, steps, after in run_ranks(2, _trained, _config(**LAYOUTS[layout])):
        np.testing.assert_allclose(before, alone[0], rtol=1e-11)
        np.testing.assert_allclose(after, alone[2], rtol=1e-9)
        for ours, expected in zip(steps, alone[1], strict=True):
            assert ours == pytest.approx(expected, rel=1e-9)


def _sampled(config: RunConfig, sampled: dict[str, int]) -> tuple[float, list[Any]]:
    """The largest difference between sampler and trainer with replayed experts, and the experts."""
    trainer = Trainer(config, this_world())
    sampler = RolloutSampler(trainer, record_experts=True, **sampled)
    prompts = [[5, 6, 7, 8], [9], [5, 6, 7, 8]]
    groups = sampler.sample(prompts, answers=2, max_new_tokens=6, ends=[3], seed=1)
    trajectories = []
    answers = []
    for prompt, group in zip(prompts, groups, strict=True):
        for answer in group:
            assert answer.experts is not None and answer.experts.dtype == np.uint8
            trajectories.append(Trajectory.of_answer(prompt, answer.tokens, experts=answer.experts))
            answers.append(answer)
    scores = trainer.log_probs(trajectories).log_probs
    difference = max(
        float((torch.tensor(answer.log_probs, dtype=torch.float64) - row).abs().max())
        for answer, row in zip(answers, scores, strict=True)
    )
    return difference, [answer.experts.tolist() for answer in answers if answer.experts is not None]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("sampled", [{}, {"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_sampled_experts_follow_their_answers(sampled: dict[str, int]) -> None:
    (alone,) = run_ranks(1, _sampled, _config(num_layers=4, moe_layer_freq=(1, 0, 1, 1)), {})
    assert alone[0] < 1e-12
    config = _config(num_layers=4, moe_layer_freq=(1, 0, 1, 1), expert_model_parallel_size=2)
    for difference, experts in run_ranks(2, _sampled, config, sampled):
        assert difference < 1e-12
        assert experts == alone[1]
    assert len({tuple(map(tuple, token)) for text in alone[1] for token in text}) > 4


def test_wrong_records_are_refused() -> None:
    trainer = Trainer(_config())
    good = _recorded()[0]
    assert good.experts is not None
    with pytest.raises(DataError, match="1 of 2 trajectories have recorded experts"):
        trainer.log_probs([good, Trajectory(good.tokens, good.mask, good.values)])
    with pytest.raises(DataError, match="this model needs"):
        trainer.log_probs([Trajectory(good.tokens, good.mask, good.values, good.experts[:, :1])])
    with pytest.raises(DataError, match="outside of 0 to 3"):
        trainer.log_probs([Trajectory(good.tokens, good.mask, good.values, good.experts + 4)])
    dense = Trainer(RunConfig.from_flat(TINY | {"mock_data": False}))
    with pytest.raises(ConfigError, match="record_experts=True needs a model with experts"):
        RolloutSampler(dense, record_experts=True)
