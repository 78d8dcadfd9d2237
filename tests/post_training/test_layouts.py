"""RolloutSampler and trainer have the same bits in every pair of layouts, and a trainer trains as one process does."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from megatron_core.config import RunConfig
from megatron_core.post_training import Answer, RolloutSampler, Trainer, Trajectory, largest_difference, objectives
from megatron_core.verify.ranks import run_ranks, this_world
from tests.defects.plant import planted
from tests.runs import TINY

SETTINGS = TINY | {
    "mock_data": False,
    "seq_length": 32,
    "position_embedding_type": "rope",
    "lr_decay_style": "constant",
    "layout_invariant": True,
}
EXPERTS = {"num_experts": 4, "disable_bias_linear": True}
TRAINED: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
    "ep2": {"expert_model_parallel_size": 2} | EXPERTS,
    "bf16 tp2": {"bf16": True, "tensor_model_parallel_size": 2},
    "tp2 pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
RANKS = {"one process": 1, "tp2 pp2": 4}
SAMPLED: dict[str, dict[str, int]] = {
    "replicas": {},
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}
PAIRS = [
    (trained, sampled)
    for trained, sampled in product(TRAINED, SAMPLED)
    if (trained != "one process" or sampled == "replicas") and (trained != "tp2 pp2" or sampled == "tp2")
]


def _config(name: str) -> RunConfig:
    return RunConfig.from_flat(SETTINGS | TRAINED[name])


def _rollouts(sampler: RolloutSampler) -> tuple[list[Answer], list[Trajectory]]:
    """Answers of several lengths, and their trajectories with advantages that differ."""
    draw = random.Random(0)
    prompts = [[draw.randrange(61) for _ in range(draw.randrange(1, 8))] for _ in range(5)]
    groups = sampler.sample(prompts, answers=3, max_new_tokens=9, ends=[3], seed=5)
    answers = [answer for group in groups for answer in group]
    trajectories = [
        Trajectory.of_answer(prompt, answer.tokens, advantages=float(number - 1), old_log_probs=answer.log_probs)
        for prompt, group in zip(prompts, groups, strict=True)
        for number, answer in enumerate(group)
    ]
    return answers, trajectories


def _learn(config: RunConfig, layout: dict[str, int], pack: bool, steps: int) -> list[tuple[Any, ...]]:
    """For each step: the difference between sampler and trainer, the loss, the norm, and the sampled tokens."""
    trainer = Trainer(config, this_world(), pack=pack)
    sampler = RolloutSampler(trainer, **layout)
    results = []
    for _ in range(steps):
        answers, trajectories = _rollouts(sampler)
        difference = largest_difference(answers, trainer.log_probs(trajectories).log_probs)
        result = trainer.train_on(trajectories, objectives.grpo())
        sampler.update_weights()
        results.append((difference, result.loss, result.grad_norm, [answer.tokens for answer in answers]))
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, list[tuple[Any, ...]]]:
    """The steps of one process, for each kind of model."""
    kinds: dict[str, dict[str, Any]] = {"dense": {}, "experts": EXPERTS, "bf16": {"bf16": True}}
    return {
        name: run_ranks(1, _learn, RunConfig.from_flat(SETTINGS | kind), {}, True, 2)[0] for name, kind in kinds.items()
    }


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("trained", "sampled"), PAIRS)
def test_sampler_and_trainer_have_the_same_bits(
    trained: str, sampled: str, alone: dict[str, list[tuple[Any, ...]]]
) -> None:
    """Also after an update; the whole run has the bits of one process."""
    ranks = RANKS.get(trained, 2)
    kind = {"ep2": "experts", "bf16 tp2": "bf16"}.get(trained, "dense")
    for steps in run_ranks(ranks, _learn, _config(trained), SAMPLED[sampled], trained != "pp2", 2):
        assert [step[0] for step in steps] == [0.0, 0.0]
        assert steps == alone[kind]
    assert len({tokens for step in alone[kind] for tokens in step[3]}) > 10


def test_a_changed_kernel_is_found() -> None:
    """Scores of the sampler that another kernel would round differently differ in the first step."""
    (steps,) = run_ranks(1, _learn_with_other_scores, _config("one process"))
    assert steps[0][0] > 0.0


def _learn_with_other_scores(config: RunConfig) -> list[tuple[Any, ...]]:
    change = "nn.functional.pad(logits * (1 + 2**-20),"
    with planted("inference.generator:Generator._losses", "nn.functional.pad(logits,", change):
        return _learn(config, {}, True, 1)
