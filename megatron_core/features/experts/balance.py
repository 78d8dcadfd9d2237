"""Losses and counts for balancing the load of the experts.

Shapes: n tokens of a sequence on this rank, b sequences, E experts, k choices per token. ``counted`` ``[n, b]`` is
1 for a token that counts in losses and 0 for padding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_core.features.experts.choice import log_scores
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.transformer.context import SequenceContext

Total = Callable[[Tensor], Tensor]
BALANCING = "load_balancing_loss"
Z_LOSS = "z_loss"


def balancing_names(config: MoEConfig) -> dict[str, str]:
    """Return the type of each balancing loss and the name of its auxiliary loss; further ones have their type's."""
    names = config.balancing_losses
    return {loss_type: loss_type if number else BALANCING for number, loss_type in enumerate(names)}


def count_choices(experts: Tensor, counted: Tensor, num_experts: int) -> Tensor:
    """Count the choices of each expert by counted tokens of each sequence: ``[b, E]`` from ``[n, b, k]``."""
    weights = counted.unsqueeze(-1).expand(experts.shape)
    chosen = counted.new_zeros(*experts.shape[:2], num_experts).scatter_(-1, experts, weights)
    return chosen.sum(0)


def balancing_loss(
    logits: Tensor,
    counted: Tensor,
    config: MoEConfig,
    loss_type: str,
    sequence_group: Group,
    batch_group: Group,
    context: SequenceContext,
    layer_number: int,
    total: Total = torch.sum,
) -> Tensor:
    """Return this rank's part of the load balancing loss, a scalar; the loss is the sum over all ranks.

    For a sequence of T tokens, where P_te are the scores normalized over the experts and n_e is the number of tokens
    that have e among their k highest scores, the loss is

        E / (k T^2) sum_e n_e sum_t P_te       (1 for perfect balance)

    ``sequence_group`` contains the ranks with parts of the same sequences, and ``batch_group`` those of the data axes,
    too. Source: Fedus et al. 2021, equation 4.
    """
    # This is ``seq_aux_loss``. ``aux_loss`` treats the b sequences of a micro-batch as one sequence; its loss is
    # multiplied by b, because the mean is over sequences. ``global_aux_loss`` computes n_e / T over the ranks of
    # ``batch_group`` and the micro-batches so far, and is a sum over tokens.
    # As Megatron Core's ``switch_load_balancing_loss_func``, all of them ignore expert bias and groups in n_e.
    # Scores, and numbers of choices and of tokens, summed over sequences and ranks as the kind of loss requires.
    experts = config.num_experts or 1
    k = config.moe_router_topk
    scores = log_scores(logits, config).softmax(-1)
    # The counts are not differentiable; the gradient is that of the scores.
    with torch.no_grad():
        counts = count_choices(scores.topk(k).indices, counted, experts)
        counts_and_tokens = torch.cat([counts, counted.sum(0).unsqueeze(-1)], dim=-1)  # [b, E + 1]
        if loss_type != "seq_aux_loss":
            counts_and_tokens = counts_and_tokens.sum(0)
        if loss_type == "global_aux_loss":
            all_reduce_(counts_and_tokens, batch_group)
            if context.auxiliary_losses is not None:  # without a collector, adding the loss raises LayoutError
                counts_and_tokens = context.auxiliary_losses.counts_so_far(layer_number, counts_and_tokens)
        else:
            all_reduce_(counts_and_tokens, sequence_group)
        counts = counts_and_tokens[..., :-1]
        tokens = counts_and_tokens[..., -1].clamp_min(1.0)
    # The terms of the tokens ``[n, b]``, and their sum for each kind.
    terms = (scores * counts).sum(-1) * counted
    if loss_type == "global_aux_loss":
        return experts / k * total(terms / tokens)
    factor = 1 if loss_type == "seq_aux_loss" else logits.shape[1]
    return experts / k * total(terms / tokens.square()) * factor


def z_loss(logits: Tensor, counted: Tensor, total: Total = torch.sum) -> Tensor:
    """Return the sum of squared log-sum-exp over counted tokens, a scalar (Zoph et al. 2022, equation 5)."""
    return total(logits.logsumexp(-1).square() * counted)
