"""Advantages: how much better an answer, or a token, is than expected."""

from collections.abc import Sequence

import numpy as np

from megatron_core.errors import DataError


def group_advantages(rewards: Sequence[float], *, divide_by_std: bool = True, epsilon: float = 1e-4) -> list[float]:
    """(reward - mean) / (standard deviation + ``epsilon``) of the answers to one prompt.

    The deviation divides by n - 1, as in the authors' and in trl's code. ``divide_by_std=False`` leaves only the
    difference. Source: Shao et al. 2024 (GRPO), arXiv 2402.03300, section 4.1.2; Liu et al. 2025 (Dr. GRPO), arXiv
    2503.20783, section 3.2, without the division.
    """
    values = np.asarray(rewards, dtype=np.float64)
    centered = values - values.mean()
    if not divide_by_std:
        return centered.tolist()
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return (centered / (deviation + epsilon)).tolist()


def leave_one_out_advantages(rewards: Sequence[float]) -> list[float]:
    """Reward - mean of the other answers to the same prompt (Ahmadian et al. 2024, RLOO, arXiv 2402.14740, section 3).

    ``DataError`` for fewer than two answers.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2:
        raise DataError(f"{len(values)} answers to a prompt; the mean of the others needs at least two")
    return ((values - values.mean()) * len(values) / (len(values) - 1)).tolist()


def teacher_advantages(
    log_probs: Sequence[float], teacher_log_probs: Sequence[float], *, coefficient: float = 1.0, discount: float = 0.0
) -> list[float]:
    """-coefficient (log pi - log teacher) of each sampled token, an estimate of the negative reverse KL divergence from
    the teacher; with ``discount`` g the sum over later tokens, weighted by powers of g.

    With ``objectives.importance_sampling`` this is on-policy distillation. Source: Lu 2025, "On-Policy Distillation"
    (Thinking Machines Lab), and its cookbook's ``train_on_policy``.
    """
    if len(log_probs) != len(teacher_log_probs):
        raise DataError(f"{len(log_probs)} log-probabilities and {len(teacher_log_probs)} of the teacher; give as many")
    advantages = [0.0] * len(log_probs)
    later = 0.0
    for token in reversed(range(len(log_probs))):
        later = coefficient * (teacher_log_probs[token] - log_probs[token]) + discount * later
        advantages[token] = later
    return advantages


def generalized_advantages(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    discount: float = 1.0,
    smoothing: float = 0.95,
    value_after: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Advantages and returns of the tokens of one answer, from the reward and the critic's value of each token.

    With delta_t = r_t + discount V_{t+1} - V_t, A_t = delta_t + discount smoothing A_{t+1}; returns are A_t + V_t.
    ``value_after``: V after the last token, for an answer that was cut (the value of ``Trajectory.of_text``).
    Source: Schulman et al. 2016 (GAE), arXiv 1506.02438, equation 16.
    """
    if len(rewards) != len(values):
        raise DataError(f"{len(rewards)} rewards and {len(values)} values; give one of each for every token")
    advantages = [0.0] * len(rewards)
    later = 0.0
    for token in reversed(range(len(rewards))):
        delta = rewards[token] + discount * value_after - values[token]
        later = delta + discount * smoothing * later
        advantages[token] = later
        value_after = values[token]
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    return advantages, returns
