"""Choose the experts of each token and their probabilities from its logits.

Shapes: n tokens of a sequence, b sequences, E experts, k choices per token.
"""

from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from megatron_core.features.experts.settings import MoEConfig

SINKHORN_EPSILON = 1e-8
SINKHORN_TOLERANCE = 1e-4


def log_scores(logits: Tensor, config: MoEConfig) -> Tensor:
    """Return the logarithms of the scores ``[..., E]``; for softmax, up to a constant per token.

    Logarithms keep the ratios of scores that are all tiny; dividing by a sum plus an epsilon would not.
    """
    if config.moe_router_score_function in ("softmax", "sparsemixer"):
        return logits
    if config.moe_router_score_function == "sigmoid":
        return functional.logsigmoid(logits)
    # The logarithm of 0 would be -inf, and the gradient of the ratio NaN.
    tiny = torch.finfo(logits.dtype).tiny
    return 0.5 * functional.softplus(logits).clamp_min(tiny).log()


def choose_experts(logits: Tensor, bias: Tensor | None, config: MoEConfig) -> Tensor:
    """Return the experts of each token, int64 ``[..., k]``, from logits ``[..., E]``.

    ``bias`` ``[E]`` is added to the scores; it affects only the choice, not the probabilities. Group-limited choice
    (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1.3, and 2412.19437, section 2.1.2): the score of a group is the sum
    of its ``group_score_topk`` highest expert scores; only experts of the group_topk best groups are eligible.
    """
    if config.moe_router_score_function == "softmax":
        # The softmax does not change the order of experts, but a bias is added to scores and not to logits.
        ranking = logits.softmax(-1) if config.moe_router_pre_softmax or bias is not None else logits
    elif config.moe_router_score_function == "sparsemixer":
        ranking = logits
    else:
        ranking = log_scores(logits, config).exp()
    ranking = ranking if bias is None else ranking + bias
    k = config.moe_router_topk
    groups = config.moe_router_num_groups
    group_topk = config.moe_router_group_topk
    counted = config.group_score_topk
    if groups is not None and group_topk is not None and counted is not None:
        grouped = ranking.unflatten(-1, (groups, -1))
        best = grouped.topk(counted).values.sum(-1).topk(group_topk).indices
        eligible = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        # -inf instead of 0, because a score plus bias may be negative.
        ranking = grouped.masked_fill(~eligible[..., None], -inf).flatten(-2)
    return ranking.topk(k).indices


def probabilities(logits: Tensor, experts: Tensor, config: MoEConfig, *, drawn: Tensor | None = None) -> Tensor:
    """Return the factors on the outputs of the chosen ``experts`` ``[..., k]``, from logits ``[..., E]``.

    For softmax, the softmax over the chosen experts, or over all experts with ``moe_router_pre_softmax``. For other
    score functions, score / (sum of chosen scores + ``moe_router_sum_epsilon``), or the score itself if k = 1. For
    sparsemixer, see its function, which also gets ``drawn``.
    """
    scores = log_scores(logits, config)
    k = config.moe_router_topk
    if config.moe_router_score_function == "sparsemixer":
        chosen = sparsemixer_probabilities(logits, experts, config.moe_sparsemixer_threshold, drawn)
    elif config.moe_router_score_function == "softmax" and config.moe_router_pre_softmax:
        chosen = scores.softmax(-1).gather(-1, experts)
    elif config.moe_router_score_function != "softmax" and k == 1:
        chosen = scores.gather(-1, experts).exp()
    else:
        chosen = scores.gather(-1, experts).softmax(-1)
        if epsilon := config.moe_router_sum_epsilon:
            total = scores.gather(-1, experts).exp().sum(-1, keepdim=True)
            chosen = chosen * (total / (total + epsilon))
    factor = config.moe_router_topk_scaling_factor
    return chosen if factor is None else chosen * factor


UNSCALED = 0.75
SCALE = 0.3333
"""Share of drawn experts, apart from the likeliest ones, whose outputs have the factor ``SCALE``; constants of the code
published with Phi-3.5-MoE, where ``SCALE`` is 1/3 rounded to four digits."""


def sparsemixer_probabilities(logits: Tensor, experts: Tensor, threshold: float, drawn: Tensor | None = None) -> Tensor:
    """Return the factors on the outputs of the ``experts``, chosen one after the other.

    With m the largest logit of the experts not chosen before, the factor of a choice is the softmax over those of them
    whose logit x is near it: (m - x) / max(|x|, m) <= 2 ``threshold``. ``drawn`` ``[..., k]``, samples of U(0, 1): the
    experts are drawn, and the factor of most choices but the likeliest is divided by 3, with unchanged gradients.
    Source: Liu et al. 2024 (GRIN, arXiv 2409.12136, section 2); Liu et al. 2023 (arXiv 2310.00811, section 3).
    """
    # In expectation, gradients of drawn experts are those of Heun's third-order method for the difference of an
    # expert's output and none.
    left = logits
    factors = []
    for number, chosen in enumerate(experts.split(1, dim=-1)):
        shares = _near(left, logits, threshold).softmax(-1)
        share = shares.gather(-1, chosen)
        if drawn is not None:
            unscaled = (chosen == shares.argmax(-1, keepdim=True)) | (drawn[..., number, None] > UNSCALED)
            # Detached, so that only the value is scaled and the gradient is that of the whole share.
            share = share + share.detach().masked_fill(unscaled, 0.0) * (SCALE - 1)
        factors.append(share)
        left = left.scatter(-1, chosen, -inf)
    return torch.cat(factors, dim=-1)


@torch.no_grad()
def draw_sparsemixer(logits: Tensor, noise: Tensor, threshold: float) -> Tensor:
    """Draw the experts of each token one after the other by their probabilities, int64 ``[..., k]``.

    ``noise`` ``[..., k, E]``: samples of U(0, 1), of which Gumbel noise is added to the logits ``[..., E]``.
    """
    left = logits
    experts = []
    for drawn in noise.unbind(-2):
        chosen = (_near(left, logits, threshold) - (-drawn.log()).log()).argmax(-1, keepdim=True)
        experts.append(chosen)
        left = left.scatter(-1, chosen, -inf)
    return torch.cat(experts, dim=-1)


def _near(left: Tensor, logits: Tensor, threshold: float) -> Tensor:
    """``left`` with -inf for the experts whose logits are far from the largest one in ``left``."""
    with torch.no_grad():
        largest = left.amax(-1, keepdim=True)
        far = (largest - logits) / torch.maximum(logits.abs(), largest) > 2 * threshold
    return left.masked_fill(far, -inf)


def sinkhorn_probabilities(logits: Tensor, experts: Tensor, config: MoEConfig) -> Tensor:
    """Return the factors for sinkhorn choices: sigmoid if k = 1, else softmax over all experts (Megatron Core)."""
    scores = logits.sigmoid() if config.moe_router_topk == 1 else logits.softmax(-1)
    return scores.gather(-1, experts)


@torch.no_grad()
def sinkhorn(logits: Tensor) -> Tensor:
    """Scale rows and columns of exp(logits) ``[n, E]`` in turn until all rows and all columns have equal sums.

    Source: Sinkhorn 1964; Clark et al. 2022, section 3.2.
    """
    cost = (logits - logits.max()).exp()  # a constant factor does not affect the result
    columns = torch.ones(cost.shape[1], dtype=cost.dtype, device=cost.device)
    error = inf
    while error > SINKHORN_TOLERANCE:
        rows = 1 / (cost.shape[0] * ((columns * cost).sum(1) + SINKHORN_EPSILON))
        before = columns
        columns = 1 / (cost.shape[1] * ((rows[:, None] * cost).sum(0) + SINKHORN_EPSILON))
        # Waits for the device: the number of iterations depends on the data.
        error = float((before - columns).abs().mean())
    return rows[:, None] * cost * columns


@torch.no_grad()
def within_capacity(experts: Tensor, probs: Tensor, num_experts: int, capacity: int, policy: str) -> Tensor:
    """Return which choices are kept if an expert accepts at most ``capacity`` tokens per sequence, bool ``[n, b, k]``.

    ``experts`` and ``probs`` ``[n, b, k]`` are for whole sequences, ordered by position. Policy ``probs`` keeps the
    choices with the highest probabilities, and the first ones among equal probabilities; ``position`` keeps the first
    choices.
    """
    shape = (*experts.shape[:2], num_experts)
    taken = torch.zeros(shape, dtype=torch.bool, device=experts.device).scatter_(-1, experts, True)
    if policy == "position":
        rank = taken.cumsum(0) - 1
    else:
        priority = torch.full(shape, -inf, dtype=probs.dtype, device=probs.device).scatter_(-1, experts, probs)
        # Stable, so that the choice among equal probabilities is the same in every layout.
        rank = priority.argsort(dim=0, descending=True, stable=True).argsort(dim=0)
    return (rank < capacity).gather(-1, experts)
