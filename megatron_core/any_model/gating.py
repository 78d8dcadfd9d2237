"""Gates of mixtures of experts with a capacity: top-1 (Fedus et al. 2021), top-2 (Lepikhin et al. 2020) and top-k.

Signatures, random numbers and rounding are those of ``deepspeed.moe.sharded_moe``. S tokens, E experts, k choices of
each token, C rows of each expert's buffer (the capacity).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group

Dense = tuple[Tensor, Tensor, Tensor, Tensor]


class Routes(NamedTuple):
    """Choices of all tokens, and their rows in the buffers of the experts."""

    aux_loss: Tensor
    """Loss that balances the load."""
    capacity: int
    num_experts: int
    experts: Tensor
    """``[k, S]``, int32; -1: the choice is dropped."""
    rows: Tensor
    """``[k, S]``, int32."""
    weights: Tensor
    """``[k, S]``."""
    counts: Tensor
    """``[E]``: tokens that chose each expert, before some are dropped."""


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: Group | None = None,
    sparse_routes: bool = False,
) -> Routes | Dense:
    """Route each token to its best expert; with ``use_rts`` a full expert drops random tokens, else the last ones.

    ``logits``: ``[S, E]``. ``used_token``: ``[S]``, 0 for tokens without an expert. ``noisy_gate_policy`` RSample adds
    Gumbel noise to the choice. Returns ``Routes`` with ``sparse_routes``, else (loss, weights ``[S, E, C]``, their
    mask, counts).
    """
    gates = logits.softmax(1)
    choice = (logits + gumbel(logits) if noisy_gate_policy == "RSample" else gates).argmax(1)
    chosen = functional.one_hot(choice, gates.shape[1])
    if used_token is not None:
        chosen = used_token[:, None].to(chosen.dtype) * chosen
    counts = chosen.sum(0)
    capacity = (
        _capacity(gates, capacity_factor, min_capacity) if drop_tokens else min(_largest(counts, ep_group), len(gates))
    )
    loss = _balance(gates, chosen)
    if len(logits) < min_capacity:
        raise ConfigError(
            f"MoE: {len(logits)} tokens are fewer than min_capacity={min_capacity}; set min_capacity=0, or increase "
            "the batch size"
        )
    priority = chosen * torch.rand(chosen.shape, device=chosen.device) if use_rts else chosen
    selected = priority.topk(min(capacity, len(gates)), dim=0).indices
    accepted = chosen * torch.zeros_like(chosen).scatter_(0, selected, 1)
    rows = (accepted.cumsum(0) - 1) * accepted
    routes = _routes(loss, capacity, [(choice, accepted, rows)], (gates * accepted).sum(1)[None], counts)
    return routes if sparse_routes else _dense(routes)


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Group | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
) -> Routes | Dense:
    """Route each token to two experts, the second one drawn with Gumbel noise; see ``top1gating``.

    A full expert drops the last tokens, and second choices before first ones.
    """
    gates = logits.softmax(1)
    experts = gates.shape[1]
    first = gates.argmax(1)
    first_mask = functional.one_hot(first, experts)
    noisy = logits + gumbel(logits) if top2_2nd_expert_sampling else logits
    second = noisy.masked_fill(first_mask.bool(), float("-inf")).argmax(1)
    second_mask = functional.one_hot(second, experts)
    counts = (first_mask + second_mask).sum(0)
    loss = _balance(gates, first_mask)
    capacity = _capacity(gates, 2 * capacity_factor, min_capacity) if drop_tokens else _largest(counts, ep_group)
    first_rows = first_mask.cumsum(0) - 1
    second_rows = second_mask.cumsum(0) - 1 + first_mask.sum(0, keepdim=True)
    choices = []
    for choice, mask, rows in ((first, first_mask, first_rows), (second, second_mask, second_rows)):
        accepted = mask * (rows < capacity) if drop_tokens else mask
        choices.append((choice, accepted, rows * accepted))
    weights = torch.stack([(gates * accepted).sum(1) for _, accepted, _ in choices])
    weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
    routes = _routes(loss, capacity, choices, weights, counts)
    return routes if sparse_routes else _dense(routes)


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: Group | None = None,
    drop_policy: str = "probs",
    sparse_routes: bool = False,
) -> Routes | Dense:
    """Route each token to its ``k`` best experts; see ``top1gating``.

    ``drop_policy``: a full expert drops the tokens with the smallest probability (``probs``), or the last ones
    (``position``).
    """
    gates = logits.softmax(1)
    best = gates.topk(k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, best.indices, 1)
    counts = mask.sum(0)
    loss = _balance(gates, mask) / k
    capacity = _capacity(gates, k * capacity_factor, min_capacity) if drop_tokens else _largest(counts, ep_group)
    rows = mask.cumsum(0) - 1
    if drop_tokens and drop_policy == "probs":
        chosen = torch.zeros_like(gates).scatter(1, best.indices, best.values)
        likely = chosen.topk(min(capacity, len(gates)), dim=0, sorted=False).indices
        mask &= torch.zeros_like(mask).scatter_(0, likely, True)
        rows = mask.cumsum(0) - 1
    elif drop_tokens and drop_policy == "position":
        mask &= rows < capacity
    elif drop_tokens:
        raise ValueError(f"drop_policy={drop_policy!r} must be 'probs' or 'position'")
    accepted = gates * mask
    accepted = accepted / accepted.sum(-1, keepdim=True).clamp(min=torch.finfo(accepted.dtype).eps)
    is_accepted = mask.gather(1, best.indices)
    routes = Routes(
        loss,
        capacity,
        gates.shape[1],
        torch.where(is_accepted, best.indices, -1).t().contiguous().int(),
        (rows.gather(1, best.indices) * is_accepted).t().contiguous().int(),
        accepted.gather(1, best.indices).t().contiguous(),
        counts,
    )
    return routes if sparse_routes else _dense(routes)


def buffer_slots(experts: Tensor, rows: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the row of each choice in the buffers of all experts, ``[E * C]``; E * C for a dropped choice."""
    return torch.where(experts < 0, num_experts * capacity, experts.long() * capacity + rows)


def fill_buffers(tokens: Tensor, slots: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Copy ``tokens`` ``[S, hidden]`` into buffers ``[E, C, hidden]``; rows without a token are zero."""
    count, width = tokens.shape
    source = torch.full((num_experts * capacity + 1,), count, device=slots.device)
    numbers = torch.arange(count, device=slots.device).expand_as(slots)
    source.scatter_(0, slots.flatten(), numbers.flatten())
    padded = torch.cat([tokens, tokens.new_zeros(1, width)])
    return padded[source[:-1]].view(num_experts, capacity, width)


def combine_rows(outputs: Tensor, slots: Tensor, weights: Tensor, num_tokens: int) -> Tensor:
    """Return the weighted sum of the rows ``slots`` of ``outputs`` ``[E * C, hidden]`` for each token."""
    padded = torch.cat([outputs, outputs.new_zeros(1, outputs.shape[1])])
    chosen = padded[slots].view(len(slots), num_tokens, -1)
    # The weights are float32, and so is the sum of 16-bit outputs.
    return (chosen * weights[..., None]).sum(0).to(outputs.dtype)


def jittered(x: Tensor, epsilon: float = 1e-2) -> Tensor:
    """Multiply ``x`` by uniform random numbers from 1 - epsilon to 1 + epsilon."""
    low, high = (torch.tensor(1.0 + sign * epsilon, device=x.device) for sign in (-1, 1))
    return x * torch.distributions.Uniform(low, high).rsample(x.shape)


def gumbel(x: Tensor) -> Tensor:
    """Draw standard Gumbel noise of the shape of ``x``, float32."""
    location = torch.zeros((), device=x.device)
    scale = torch.ones((), device=x.device)
    return torch.distributions.Gumbel(location, scale).rsample(x.shape)


def _capacity(gates: Tensor, factor: float, minimum: int) -> int:
    # The product is rounded to float32, as by DeepSpeed: its capacity is one smaller or larger in rare cases.
    return max(int(torch.ceil(len(gates) / gates.shape[1] * torch.tensor(factor))), minimum)


def _largest(counts: Tensor, group: Group | None) -> int:
    """Capacity without dropped tokens; it is equal on all ranks, because they exchange whole buffers."""
    largest = counts.max().reshape(1)
    if group is not None:
        all_reduce_(largest, group, maximum=True)
    return int(largest)


def _balance(gates: Tensor, mask: Tensor) -> Tensor:
    """E * sum over experts of (mean probability) * (share of the tokens)."""
    return (gates.mean(0) * mask.float().mean(0)).sum() * gates.shape[1]


def _routes(loss: Tensor, capacity: int, choices: list[Any], weights: Tensor, counts: Tensor) -> Routes:
    experts = [torch.where(accepted.any(1), choice, -1) for choice, accepted, _ in choices]
    rows = [row.sum(1) for _, _, row in choices]
    stacked = torch.stack(experts).int(), torch.stack(rows).int()
    return Routes(loss, capacity, len(counts), *stacked, weights, counts.detach())


def _dense(routes: Routes) -> Dense:
    """Return the loss, weights ``[S, E, C]`` of each token in each row of the buffers, their mask, and the counts."""
    # An expert of its own for dropped choices.
    experts = functional.one_hot(routes.experts.long() % (routes.num_experts + 1), routes.num_experts + 1)[..., :-1]
    rows = functional.one_hot(routes.rows.long(), routes.capacity)
    weights = routes.weights
    combine = torch.einsum("ks,kse,ksc->sec", weights, experts.to(weights), rows.to(weights))
    return routes.aux_loss, combine, combine.bool(), routes.counts
