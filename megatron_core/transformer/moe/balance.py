"""Losses and counts for a balanced load of the experts.

Shapes: n tokens of a sequence on this rank, b sequences, E experts, k choices of each token. ``counted`` ``[n, b]`` is
1 for a token that counts and 0 for padding.
"""

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.moe.choice import log_scores

BALANCING, Z_LOSS = "load_balancing_loss", "z_loss"


def count_choices(experts: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen by the tokens of each sequence that count: ``[b, E]`` from ``[n, b, k]``."""
    weights = counted.unsqueeze(-1).expand(experts.shape)
    chosen = counted.new_zeros(*experts.shape[:2], num_experts).scatter_(-1, experts, weights)
    return chosen.sum(0)


def balancing_loss(
    logits: Tensor,
    counted: Tensor,
    config: ModelConfig,
    sequence_group: Group,
    batch_group: Group,
    context: SequenceContext,
    layer_number: int,
) -> Tensor:
    """This rank's part of the load balancing loss, a scalar; the parts of all ranks add up to it.

    By sequence, of T tokens, with P_te the scores normalised over the experts and n_e how many tokens have e among
    their k highest scores:

        E / (k T^2) sum_e n_e sum_t P_te       in the limit of balance 1

    ``aux_loss`` takes all b sequences of the micro-batch as one, and counts it b times, as its mean is over sequences.
    ``global_aux_loss``, a sum over tokens, has n_e / T over the ranks of ``batch_group`` and the micro-batches so far.
    Choices for it are those without bias and groups. ``sequence_group`` are the ranks that have parts of the same
    sequences. Source: Fedus et al. 2021, equation 4; Megatron Core's ``switch_load_balancing_loss_func``.
    """
    experts, k = config.num_experts or 1, config.moe_router_topk
    scores = log_scores(logits, config).softmax(-1)
    mass = (scores * counted.unsqueeze(-1)).sum(0)  # [b, E]
    with torch.no_grad():
        counts = count_choices(scores.topk(k).indices, counted, experts)
        both = torch.cat([counts, counted.sum(0).unsqueeze(-1)], dim=-1)  # [b, E + 1]
        kind = config.moe_router_load_balancing_type
        if kind != "seq_aux_loss":
            both = both.sum(0)
        if kind == "global_aux_loss":
            all_reduce_(both, batch_group)
            if context.auxiliary_losses is not None:  # without it the loss is refused where it is added
                both = context.auxiliary_losses.counts_so_far(layer_number, both)
        else:
            all_reduce_(both, sequence_group)
        counts, tokens = both[..., :-1], both[..., -1].clamp_min(1.0)
    if kind == "seq_aux_loss":
        return experts / k * ((mass * counts).sum(-1) / tokens.square()).sum()
    mass = mass.sum(0)
    if kind == "global_aux_loss":
        return experts / k * (mass * counts).sum() / tokens
    return experts / k * (mass * counts).sum() / tokens.square() * logits.shape[1]


def z_loss(logits: Tensor, counted: Tensor) -> Tensor:
    """Sum of squared log-sum-exp over the tokens that count, a scalar (Zoph et al. 2022, equation 5)."""
    return (logits.logsumexp(-1).square() * counted).sum()
