"""Prompts, answers and values of their tokens: the inputs of trl's policy losses and of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

STEPS, PROMPT_LENGTH, LONGEST_ANSWER, VOCABULARY = 4, 5, 11, 259
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
CORRECTION_CAP = 1.5

KINDS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.05},
    "grpo, two-sided clip": {"loss_type": "grpo", "delta": 1.3},
    "mean over tokens, entropy": {"loss_type": "bnpo", "entropy_coef": 0.03},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "dapo, other sampler": {"loss_type": "dapo", "use_vllm": True},
}
"""Settings of trl's loss that differ from its defaults in ``make_files``."""


@dataclass(frozen=True)
class Sampled:
    """An answer to a prompt, with a number for each of its tokens; ``advantage`` for all of them."""

    prompt: list[int]
    answer: list[int]
    advantage: float
    mask: list[int]
    """0 for tokens of tools."""
    old_log_probs: list[float]
    reference_log_probs: list[float]
    sampler_log_probs: list[float]


def sampled(step: int) -> list[Sampled]:
    """The answers of a step; numpy keeps the stream the same in all versions."""
    draw = np.random.RandomState(100 + step)
    answers = []
    for _ in range(6):
        length = draw.randint(1, LONGEST_ANSWER + 1)
        # Around the log-probability of a model that has learned nothing, with ratios on both sides of all limits.
        old = -np.log(VOCABULARY) + draw.normal(0.0, 0.4, length)
        mask = (draw.uniform(size=length) < 0.8).astype(int)
        mask[0] = 1
        answers.append(
            Sampled(
                draw.randint(0, VOCABULARY, PROMPT_LENGTH).tolist(),
                draw.randint(0, VOCABULARY, length).tolist(),
                float(draw.normal()),
                mask.tolist(),
                old.tolist(),
                (old + draw.normal(0.0, 0.3, length)).tolist(),
                (old + draw.normal(0.0, 0.4, length)).tolist(),
            )
        )
    return answers
