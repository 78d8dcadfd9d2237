"""A mixture of experts: the choice of experts, the factors on their outputs, balancing losses, capacity, and biases."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.plain.mlp import expert, shared_experts
from tests.plain.norms import Weights, under

Noise = Callable[[str, Tensor], Tensor]
"""(kind, tensor ``[b, t, n]``) -> samples of U(0, 1) of this shape."""


def rounded_to_mxfp8(x: Tensor) -> Tensor:
    """Rouhani et al. 2023 (arXiv 2310.10537): blocks of 32 numbers along the last dim as e4m3 times a power of two, the
    smallest one that brings the block's largest number to 448, the largest of e4m3, or below."""
    blocks = []
    for block in x.split(32, -1):
        largest = block.abs().amax(-1, keepdim=True)
        power = torch.ceil(torch.log2(largest / 448)).masked_fill(largest == 0, 0)
        blocks.append((block * 2**-power).to(torch.float8_e4m3fn).double() * 2**power)
    return torch.cat(blocks, -1)


class Rounded(torch.autograd.Function):
    """The identity, with ``forward`` or ``backward`` in 8 bits: gradients are those of the identity."""

    @staticmethod
    def forward(ctx, x, rounds_values, rounds_gradients):
        ctx.rounds = rounds_gradients
        return rounded_to_mxfp8(x) if rounds_values else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return rounded_to_mxfp8(grad) if ctx.rounds else grad, None, None


@dataclass
class Collected:
    """Values of one step that layers add to: auxiliary losses with their coefficients, and loads of experts."""

    mask: Tensor
    """``[b, t]`` of the global batch, 1 for tokens that count."""
    micro_batch: int
    """Sequences of a micro-batch."""
    losses: dict[str, list[Tensor]] = field(default_factory=dict)
    """Values of the losses by name, as they are logged: without coefficients."""
    objective: list[Tensor] = field(default_factory=list)
    """Terms that are minimised in addition to the loss of the model."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Choices of each expert by the global batch, by the number of the layer."""
    balanced: dict[int, list[Tensor]] = field(default_factory=dict)
    """The biases ``[E]`` that would have balanced each micro-batch, by the number of the layer."""

    def add(self, name: str, value: Tensor, coefficient: float) -> None:
        """Add a loss."""
        self.losses.setdefault(name, []).append(value.detach())
        self.objective.append(coefficient * value)


def scores_of(s: SimpleNamespace, logits: Tensor) -> Tensor:
    """Scores of all experts: softmax, sigmoid (DeepSeek-V3, equation 15) or the root of softplus."""
    if s.moe_router_score_function == "softmax":
        return logits.softmax(-1)
    if s.moe_router_score_function == "sigmoid":
        return torch.sigmoid(logits)
    return torch.nn.functional.softplus(logits).sqrt()


def choose(s: SimpleNamespace, scores: Tensor, bias: Tensor | None) -> Tensor:
    """The k experts of one token from its scores ``[E]``.

    Wang et al. 2024 (arXiv 2408.15664), algorithm 1: a bias on the scores of the choice. DeepSeek-V2, section 2.1.3,
    and V3, section 2.1.2: only experts of the best groups, by the sum of a group's highest scores.
    """
    ranking = scores.detach() if bias is None else scores.detach() + bias
    groups, best = s.moe_router_num_groups, s.moe_router_group_topk
    if groups and best and best < groups:
        counted = s.moe_router_group_score_topk or s.moe_router_topk // best
        size = s.num_experts // groups
        of_groups = ranking.view(groups, size).sort(descending=True).values[:, :counted].sum(1)
        for group in of_groups.argsort(descending=True)[best:].tolist():
            ranking = ranking.clone()
            ranking[group * size : (group + 1) * size] = -math.inf
    return ranking.argsort(descending=True)[: s.moe_router_topk]


def factors_of(s: SimpleNamespace, logits: Tensor, chosen: Tensor) -> Tensor:
    """The factors on the outputs of the chosen experts of one token.

    softmax: over the chosen logits (Shazeer et al. 2017, equation 3), or over all before the choice (Fedus et al. 2021,
    equation 1). Others: score / (sum of chosen scores + eps) (DeepSeek-V3, equation 13), or the score of a single one.
    """
    if s.moe_router_score_function == "softmax":
        share = logits.softmax(-1)[chosen] if s.moe_router_pre_softmax else logits[chosen].softmax(-1)
    else:
        share = scores_of(s, logits)[chosen]
        if s.moe_router_topk > 1:
            share = share / (share.sum() + s.moe_router_sum_epsilon)
    return share * (s.moe_router_topk_scaling_factor or 1.0)


def sparsemixer(s: SimpleNamespace, logits: Tensor, drawn: Tensor | None) -> tuple[Tensor, Tensor]:
    """GRIN (Liu et al. 2024, arXiv 2409.12136, section 2): experts of one token, chosen one after the other.

    The factor of a choice is its softmax over the experts left whose logit x has (m - x) / max(|x|, m) <= 2 t. With
    ``drawn`` ``[k, 2 E + 1]`` from U(0, 1) an expert is drawn by this softmax: the largest x + Gumbel noise, of 32 bits
    in two numbers; and the value of the factor, but not its gradient, is divided by 3 unless the expert is likeliest
    or the last number is above 3/4 (Liu et al. 2023, arXiv 2310.00811, section 3; 1/3 is 0.3333 in the published code).
    """
    left, chosen, factors = logits, [], []
    for number in range(s.moe_router_topk):
        m = left.detach().max()
        far = (m - logits.detach()) / torch.maximum(logits.detach().abs(), m) > 2 * s.moe_sparsemixer_threshold
        near = left.masked_fill(far, -math.inf)
        expert, factor = int(near.detach().argmax()), 1.0
        if drawn is not None:
            high, low = drawn[number, : s.num_experts], drawn[number, s.num_experts : 2 * s.num_experts]
            likeliest = expert
            expert = int((near.detach() - torch.log(-torch.log(high + (low - 0.5) / 2**16))).argmax())
            factor = 1.0 if expert == likeliest or drawn[number, -1] > 0.75 else 0.3333
        share = near.softmax(-1)[expert]
        chosen.append(expert)
        factors.append(share + (factor - 1) * share.detach())
        left = left.index_fill(0, torch.tensor([expert]), -math.inf)
    return torch.tensor(chosen), torch.stack(factors) * (s.moe_router_topk_scaling_factor or 1.0)


def sinkhorn(logits: Tensor) -> Tensor:
    """Clark et al. 2022, section 3.2, with the constants of Megatron Core: rows and columns are scaled in turn."""
    cost = logits.exp()
    rows, columns = torch.ones(len(cost)).double(), torch.ones(cost.shape[1]).double()
    while True:
        rows = 1 / len(cost) / ((columns * cost).sum(1) + 1e-8)
        before, columns = columns, 1 / cost.shape[1] / ((rows[:, None] * cost).sum(0) + 1e-8)
        if (before - columns).abs().mean() <= 1e-4:
            return columns * cost * rows[:, None]


def routed(s: SimpleNamespace, logits: Tensor, bias: Tensor | None, micro: int, noise: Noise) -> tuple[Tensor, Tensor]:
    """Experts and factors of all tokens ``[b, t, k]`` from logits ``[b, t, E]``."""
    b, t, _ = logits.shape
    drawn = None
    if s.moe_sparsemixer_sampling:
        numbers = s.moe_router_topk * (2 * s.num_experts + 1)
        drawn = noise("sampling", logits.new_empty(b, t, numbers)).view(b, t, s.moe_router_topk, -1)
    if s.moe_router_load_balancing_type.endswith("sinkhorn"):
        size = 1 if s.moe_router_load_balancing_type == "seq_sinkhorn" else micro
        parts = [sinkhorn(part.detach().flatten(0, 1)).view_as(part) for part in logits.split(size)]
        chosen = torch.cat(parts).argsort(dim=-1, descending=True)[..., : s.moe_router_topk]
        share = torch.sigmoid(logits) if s.moe_router_topk == 1 else logits.softmax(-1)
        return chosen, share.gather(-1, chosen)
    chosen, factors = [], []
    for i in range(b):
        for p in range(t):
            if s.moe_router_score_function == "sparsemixer":
                of_token, factor = sparsemixer(s, logits[i, p], None if drawn is None else drawn[i, p])
            else:
                ranking = scores_of(s, logits[i, p])
                if s.moe_router_load_balancing_type == "quantile_balancing":
                    of_token = (logits[i, p] - bias).argsort(descending=True)[: s.moe_router_topk]
                else:
                    of_token = choose(s, ranking, bias)
                if s.moe_router_force_load_balancing:
                    of_token = (p * s.moe_router_topk + torch.arange(s.moe_router_topk)) % s.num_experts
                factor = factors_of(s, logits[i, p], of_token)
            chosen.append(of_token)
            factors.append(factor)
    return torch.stack(chosen).view(b, t, -1), torch.stack(factors).view(b, t, -1)


def kept(s: SimpleNamespace, chosen: Tensor, factors: Tensor) -> Tensor:
    """Which choices ``[b, t, k]`` an expert keeps: at most ceil(n k / E factor) of the n tokens of a sequence, or of a
    micro-batch.

    Fedus et al. 2021, section 2.2. Those with the highest factors, or the first ones.
    """
    keep = torch.ones_like(chosen, dtype=torch.bool)
    if s.moe_expert_capacity_factor is None:
        return keep
    b, t, k = chosen.shape
    size = s.micro_batch_size if s.moe_capacity_per == "micro_batch" else 1
    capacity = math.ceil(size * t * k / s.num_experts * s.moe_expert_capacity_factor)
    for first, e in product(range(0, b, size), range(s.num_experts)):
        sequences = range(first, first + size)
        places = [(i, p, j) for p, i, j in product(range(t), sequences, range(k)) if chosen[i, p, j] == e]
        if s.moe_token_drop_policy == "probs":
            places.sort(key=lambda place: -factors[place].item())
        for place in places[capacity:]:
            keep[place] = False
    return keep


def balancing(s: SimpleNamespace, logits: Tensor, collected: Collected, kind: str) -> Tensor:
    """The load balancing loss of one layer: E / k sum_e f_e P_e (Fedus et al. 2021, equations 4 to 6).

    f_e is the share of counted tokens that have e among their k highest scores, without a gradient, and P_e the mean
    of their scores, normalized over the experts. seq_aux_loss: of each sequence, then the mean over sequences.
    aux_loss: of each micro-batch, then the mean over sequences. global_aux_loss: f_e of all tokens of the micro-batches
    so far, and P_e of those of the global batch.
    """
    mask, k, experts = collected.mask, s.moe_router_topk, s.num_experts
    scores = scores_of(s, logits) if s.moe_router_score_function != "sparsemixer" else logits.softmax(-1)
    shares = scores / scores.sum(-1, keepdim=True)
    highest = scores.detach().argsort(dim=-1, descending=True)[..., :k]
    has = torch.zeros_like(shares).scatter_(-1, highest, 1.0) * mask[..., None]  # [b, t, E]
    size = 1 if kind == "seq_aux_loss" else collected.micro_batch
    total = torch.zeros(()).double()
    for first in range(0, len(mask), size):
        part = slice(first, first + size)
        if kind == "global_aux_loss":
            so_far = slice(0, first + size)
            f = has[so_far].sum((0, 1)) / mask[so_far].sum().clamp(min=1)
            total = total + (shares[part] * mask[part][..., None]).sum((0, 1)) @ f / mask.sum().clamp(min=1)
        else:
            counted = mask[part].sum().clamp(min=1)
            f, mean = has[part].sum((0, 1)) / counted, (shares[part] * mask[part][..., None]).sum((0, 1)) / counted
            total = total + size * (f @ mean) / len(mask)
    return experts / k * total


def mixture(
    s: SimpleNamespace, x: Tensor, w: Weights, collected: Collected, layer: int, applied: int, noise: Noise
) -> Tensor:
    """sum over the chosen experts of factor x expert(x), plus the shared experts (Dai et al. 2024, equation 9).

    ``applied``: times that the layer is applied in a step; its balancing losses are averaged over them. ``noise``:
    samples of U(0, 1) for the router's input, which is multiplied by U(1 - eps, 1 + eps) (Fedus et al. 2021, section
    2.4).
    """
    router = under(w, "router")
    routed_input = x
    if s.moe_input_jitter_eps:
        routed_input = x * (1 + s.moe_input_jitter_eps * (2 * noise("jitter", x) - 1))
    logits = routed_input @ router["weight"].T
    if not s.disable_bias_linear:
        logits = logits + router["bias"]
    bias = router["expert_bias"].detach().double() if s.moe_router_enable_expert_bias else None
    if s.moe_router_load_balancing_type == "quantile_balancing":
        bias = router["qb_beta"].detach().double()
        parts = logits.detach().flatten(0, 1).split(collected.micro_batch * logits.shape[1])
        collected.balanced.setdefault(layer, []).extend(balanced_bias(s, part, bias) for part in parts)
    chosen, factors = routed(s, logits, bias, collected.micro_batch, noise)
    keep = kept(s, chosen, factors)
    of_experts = x @ w["fc1_latent_proj.weight"].T if s.moe_latent_size else x
    of_experts = Rounded.apply(of_experts, s.moe_dispatch_fwd_dtype == "mxfp8", False)
    weights = under(w, "experts")
    output = torch.zeros_like(of_experts)
    for e in range(s.num_experts):
        share = (factors * (keep & (chosen == e))).sum(-1, keepdim=True)
        if s.moe_apply_probs_on_input:
            # Llama 4: an expert without the token contributes nothing, also with biases.
            has = (keep & (chosen == e)).any(-1, keepdim=True)
            output = output + has * expert(s, share * of_experts, weights, e)
        else:
            output = output + share * expert(s, of_experts, weights, e)
    output = Rounded.apply(output, False, s.moe_combine_bwd_dtype == "mxfp8")
    if s.moe_latent_size:
        output = output @ w["fc2_latent_proj.weight"].T
    if s.moe_shared_expert_intermediate_size:
        output = output + shared_experts(s, x, under(w, "shared_experts"))
    kinds = [(s.moe_router_load_balancing_type, s.moe_aux_loss_coeff)]
    kinds += zip(s.moe_further_balancing_types, s.moe_further_aux_loss_coeffs, strict=True)
    for number, (kind, coefficient) in enumerate(kinds):
        if coefficient and kind.endswith("aux_loss"):
            name = kind if number else "load_balancing_loss"
            collected.add(name, balancing(s, logits, collected, kind), coefficient / applied)
    if s.moe_z_loss_coeff:  # Zoph et al. 2022, equation 5
        z = (logits.logsumexp(-1) ** 2 * collected.mask).sum() / collected.mask.sum().clamp(min=1)
        collected.add("z_loss", z, s.moe_z_loss_coeff)
    counts = [((chosen == e).any(-1) * collected.mask).sum() for e in range(s.num_experts)]
    collected.loads[layer] = collected.loads.get(layer, 0) + torch.stack(counts)
    return output


def balanced_bias(s: SimpleNamespace, logits: Tensor, bias: Tensor) -> Tensor:
    """The bias of each expert that exactly T k / E of the T tokens exceed: by how much their logits exceed the highest
    biased value that the token does not choose. Megatron Core's quantile balancing."""
    excess = []
    for of_token in logits:
        excess.append(of_token - (of_token - bias).sort(descending=True).values[s.moe_router_topk])
    share = len(logits) * s.moe_router_topk // s.num_experts
    return torch.stack(excess).sort(dim=0, descending=True).values[share]


def updated_quantiles(s: SimpleNamespace, bias: Tensor, balanced: list[Tensor]) -> Tensor:
    """A moving average over steps of the mean over micro-batches, with mean 0, stored in float32."""
    m = s.moe_router_quantile_balancing_ema
    new = m * bias.double() + (1 - m) * torch.stack(balanced).mean(0)
    return (new - new.mean()).float()


def updated_bias(s: SimpleNamespace, bias: Tensor, load: Tensor) -> Tensor:
    """b_e + u sign(mean load - load of e) (Wang et al. 2024, algorithm 1), stored in float32."""
    return bias + s.moe_router_bias_update_rate * torch.sign(load.double().mean() - load.double()).float()
