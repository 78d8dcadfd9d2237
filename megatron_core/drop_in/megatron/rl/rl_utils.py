"""Losses and log-probabilities of Megatron-LM's ``rl_utils``; ``megatron_core.post_training`` has the loop."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.core import parallel_state
from megatron_core.drop_in.unsupported import unsupported


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """The log-probabilities ``[...]`` of ``index`` ``[...]`` with ``logits`` ``[..., n]``."""
    return -cross_entropy(logits.flatten(0, -2), index.flatten(), reduction="none").view(index.shape)


def get_logprobs(
    model: Any,
    tokens: Tensor,
    position_ids: Tensor,
    no_grad: bool = False,
    sequence_packing: bool = False,
    packed_seq_params: Any = None,
) -> Tensor:
    """The log-probabilities ``[b, s - 1]`` of ``tokens`` ``[b, s]``; the model's output before the last stage."""
    del sequence_packing  # packed_seq_params has the borders
    if parallel_state.get_context_parallel_world_size() > 1:
        unsupported("get_logprobs with context parallelism is not supported; use megatron_core.post_training.Trainer")()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not no_grad):
        output: Tensor = model(
            tokens, position_ids, None, packed_seq_params=packed_seq_params, runtime_gather_output=True
        )
    if not parallel_state.is_pipeline_last_stage():
        return output
    return selective_log_softmax(output[:, :-1], tokens[:, 1:])


def calculate_grpo_advantages(rewards: Sequence[Sequence[float]], num_turns: Sequence[Sequence[int]]) -> list[float]:
    """(reward - mean) / (1e-4 + deviation) in each group, without episodes of no turns, whose advantage is 0."""
    took_turns = torch.tensor(num_turns) > 0
    counts = took_turns.sum(-1, keepdim=True).clamp(min=1)
    values = torch.tensor(rewards, dtype=torch.float64).where(took_turns, 0.0)
    differences = (values - values.sum(-1, keepdim=True) / counts).where(took_turns, 0.0)
    deviations = (differences.square().sum(-1, keepdim=True) / counts).sqrt()
    return (differences / (1e-4 + deviations)).flatten().tolist()


def calculate_grpo_loss(
    current_logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    advantages: Tensor,
    clamp_eps_lower: float,
    clamp_eps_upper: float,
    kl_beta: float,
    entropy_weight: float,
    inference_logprobs: Tensor | None = None,
    is_truncation_coef: float | None = None,
    seq_starts: Sequence[int] | None = None,
    seq_lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, KL term, ratios, entropy term, and the ratios above and below the clip, each ``[b, s]`` (arXiv 2402.03300).

    ``advantages``: one for each row, or for each packed sequence of the only row.
    """
    if seq_starts is None or seq_lengths is None:
        of_tokens = advantages.view(-1, 1)
    else:
        of_tokens = torch.zeros_like(current_logprobs)
        for start, length, advantage in zip(seq_starts, seq_lengths, advantages, strict=True):
            of_tokens[0, start : start + length - 1] = advantage  # the first token has no log-probability
    ratios = (current_logprobs - old_logprobs).exp()
    clipped = ratios.clamp(1 - clamp_eps_lower, 1 + clamp_eps_upper)
    difference = ref_logprobs - current_logprobs
    divergence = difference.exp() - difference - 1
    entropy = -current_logprobs.exp() * current_logprobs
    gain = torch.min(ratios * of_tokens, clipped * of_tokens)
    if inference_logprobs is not None:
        limit = torch.inf if is_truncation_coef is None else is_truncation_coef
        gain = gain * (old_logprobs - inference_logprobs).exp().clamp(max=limit)
    loss = kl_beta * divergence - gain - entropy_weight * entropy
    return loss, divergence, ratios, entropy, ratios > 1 + clamp_eps_upper, ratios < 1 - clamp_eps_lower
