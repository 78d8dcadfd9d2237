"""The choices, probabilities and losses of a router as functions of its logits."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron_core.errors import ConfigError
from megatron_core.features.experts import choice
from megatron_core.features.experts.choice import sinkhorn
from megatron_core.features.experts.quantile import quantile_choice
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.parallel.collectives import all_reduce_


def topk_routing_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
    dense_output: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits ``[T, E]`` -> probabilities and the choice as bool, both ``[T, E]``.

    With ``dense_output`` return the probabilities and numbers of the chosen experts, ``[T, k]``. ``router_replay``
    records or repeats the choice, and ``precomputed_indices`` ``[T, k]`` replace it; ``fused`` has no effect. Scores
    are computed at least in float32.
    """
    config = MoEConfig(
        moe_router_topk=topk,
        moe_router_pre_softmax=use_pre_softmax,
        moe_router_num_groups=num_groups,
        moe_router_group_topk=group_topk,
        moe_router_topk_scaling_factor=scaling_factor,
        moe_router_score_function=score_function,  # type: ignore[arg-type]
    )
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts = precomputed_indices
    if experts is None:
        experts = choice.choose_experts(wide.detach(), expert_bias, config)
    if router_replay is not None:
        experts = router_replay.replayed(experts)
    probs = choice.probabilities(wide, experts, config).to(logits.dtype)
    if dense_output:
        return probs, experts
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    return torch.zeros_like(logits).scatter(1, experts, probs), chosen


def group_limited_topk(
    scores: Tensor, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[Tensor, Tensor]:
    """Return scores and numbers ``[T, k]`` of the best experts in the best groups, see ``choice.choose_experts``."""
    config = MoEConfig(
        moe_router_topk=topk,
        moe_router_num_groups=num_groups,
        moe_router_group_topk=group_topk,
        moe_router_score_function="softmax",
    )
    experts = choice.choose_experts(scores, None, config)
    return scores.gather(1, experts), experts


def qb_dual_update(scores: Tensor, k: int, beta: Tensor, update_beta: bool = True) -> tuple[Tensor, Tensor]:
    """Return the experts ``[T, k]`` of scores ``[T, E]`` and the balancing bias ``[E]``; see ``quantile_choice``.

    The bias is ``beta`` without ``update_beta``.
    """
    tokens, experts = scores.shape
    if update_beta and tokens * k % experts:
        raise ConfigError(
            f"qb_dual_update: {tokens} tokens x k={k} must be divisible by {experts} experts; "
            "change the number of tokens"
        )
    chosen, balanced = quantile_choice(scores, beta, k)
    return chosen, balanced if update_beta else beta


def get_tokens_per_expert_and_token_count(
    routing_map: Tensor, reduce_group: Any, topk: int | None = None, with_padding_mask: bool = False
) -> tuple[Tensor, Any, Any]:
    """Return the tokens of each expert ``[E]`` on the ranks of ``reduce_group``, and the numbers of tokens on this rank
    and on all of them.

    ``routing_map``: the choice as bool, ``[T, E]``. With ``with_padding_mask`` tokens without experts do not count.
    """
    local_counts = routing_map.sum(0)
    counts = local_counts.clone()
    all_reduce_(counts, reduce_group)
    if with_padding_mask:
        if not topk:
            raise ConfigError(f"get_tokens_per_expert_and_token_count: with_padding_mask needs topk, not {topk}")
        return counts, local_counts.sum() / topk, counts.sum() / topk
    return counts, len(routing_map), len(routing_map) * reduce_group.size()


def compute_routing_scores_for_aux_loss(
    logits: Tensor, topk: int, score_function: str, fused: bool = False, padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits ``[T, E]`` -> the best experts of each token as bool, and the normalized scores, both ``[T, E]``.

    Both are zero for tokens with a True ``padding_mask`` ``[T]``; ``fused`` has no effect. Scores are at least float32.
    """
    config = MoEConfig(moe_router_topk=topk, moe_router_score_function=score_function)  # type: ignore[arg-type]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = choice.log_scores(wide, config).softmax(-1)
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, scores.topk(topk).indices, True)
    if padding_mask is not None:
        counted = ~padding_mask.unsqueeze(-1)
        chosen, scores = chosen & counted, scores * counted
    return chosen, scores


def switch_load_balancing_loss_func(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    topk: int,
    num_experts: int,
    moe_aux_loss_coeff: float,
    fused: bool = False,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """coefficient E / (k T^2) sum_e n_e sum_t P_te (Fedus et al. 2021, equation 4).

    P ``[tokens, E]`` are normalized scores, n ``[E]`` the counts of T tokens; tokens with a True ``padding_mask`` do
    not count.
    """
    kept = probs if padding_mask is None else probs * ~padding_mask.unsqueeze(-1)
    scale = num_experts * moe_aux_loss_coeff / (topk * total_num_tokens * total_num_tokens)
    return (kept.sum(0) * tokens_per_expert).sum() * scale


def z_loss_func(logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None) -> Tensor:
    """coefficient times the mean squared log-sum-exp over the counted tokens (Zoph et al. 2022)."""
    squares = logits.logsumexp(-1).square()
    counted = torch.ones_like(squares) if padding_mask is None else (~padding_mask).to(squares.dtype)
    return (squares * counted).sum() / counted.sum().clamp_min(1.0) * z_loss_coeff


def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Return the maximum number of tokens of an expert: ceil(tokens / experts x factor), at least ``min_capacity``."""
    return max(math.ceil(num_tokens / num_experts * capacity_factor), min_capacity or 0)


def get_updated_expert_bias(tokens_per_expert: Tensor, expert_bias: Tensor, expert_bias_update_rate: float) -> Tensor:
    """bias + rate sign(mean load - load), ``[..., E]``, of loads already summed over ranks (Wang et al. 2024)."""
    load = tokens_per_expert.to(torch.float32)
    return expert_bias + expert_bias_update_rate * (load.mean(-1, keepdim=True) - load).sign()


def router_gating_linear(input: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor:
    """Logits ``[..., E]`` in ``router_dtype``."""
    shift = None if bias is None else bias.to(router_dtype)
    return nn.functional.linear(input.to(router_dtype), weight.to(router_dtype), shift)


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """``apply(output, loss)`` returns ``output``; in backward the loss has the gradient of ``set_loss_scale``, by
    default 1."""

    main_loss_backward_scale: Tensor | None = None

    @staticmethod
    def forward(ctx: Any, output: Tensor, aux_loss: Tensor) -> Tensor:
        """Return ``output``."""
        ctx.save_for_backward(aux_loss)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of output and loss."""
        (aux_loss,) = ctx.saved_tensors
        scale = ctx._forward_cls.main_loss_backward_scale
        return grad_output, torch.ones_like(aux_loss) * (1.0 if scale is None else scale)

    @classmethod
    def set_loss_scale(cls, scale: Tensor) -> None:
        """Set the factor of the main loss in backward."""
        if not isinstance(scale, Tensor):
            raise ConfigError(f"set_loss_scale({scale!r}): pass a tensor")
        cls.main_loss_backward_scale = scale


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    tokens_per_expert: Tensor | None = None,
    align_size: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor, None, Tensor | None]:
    """Tokens ``[T, h]`` and the choice ``[T, E]`` -> (rows sorted by expert, their probabilities, their tokens, None,
    ``tokens_per_expert``).

    ``fused``, ``num_out_tokens`` and ``align_size`` have no effect: rows are counted, and not padded. Raises
    ConfigError for ``drop_and_pad``.
    """
    _check_rows("permute", drop_and_pad)
    experts, chosen = routing_map.bool().T.nonzero(as_tuple=True)
    weights = None if probs is None else probs[chosen, experts]
    return tokens.index_select(0, chosen), weights, chosen, None, tokens_per_expert


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
    pad_offsets: Tensor | None = None,
) -> Tensor:
    """Sum the rows of ``permute`` by token, with ``probs`` ``[T, E]`` as factors: ``restore_shape`` ``[T, h]``."""
    _check_rows("unpermute", drop_and_pad)
    rows = permuted_tokens
    if probs is not None:
        if routing_map is None:
            raise ConfigError("unpermute: probs need routing_map")
        experts, chosen = routing_map.bool().T.nonzero(as_tuple=True)
        rows = rows * probs[chosen, experts].unsqueeze(-1)
    return rows.new_zeros(restore_shape).index_add_(0, sorted_indices, rows).to(permuted_tokens.dtype)


def _check_rows(user: str, drop_and_pad: bool) -> None:
    if drop_and_pad:
        raise ConfigError(
            f"{user}: drop_and_pad=True is not supported; MoELayer pads with moe_pad_expert_input_to_capacity"
        )


def sort_chunks_by_idxs(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Split into chunks of ``split_sizes`` rows and join them in the order ``sorted_idxs``, also ``probs``."""
    sizes, order = split_sizes.tolist(), sorted_idxs.tolist()
    joined = [torch.cat([x.split(sizes)[i] for i in order]) for x in (input, probs) if x is not None]
    return joined[0], joined[1] if len(joined) > 1 else None


def get_default_pg_collection() -> ProcessGroupCollection:
    """Return the groups of the current layout for layers of experts."""
    names = ["ep", "tp", "cp", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return probabilities and choice ``[T, E]`` with at most ``get_capacity`` tokens for each expert.

    Kept are the tokens with the largest probabilities, or with ``drop_policy="position"`` the first ones. With
    ``pad_to_capacity`` every expert has as many tokens, of which some were not chosen.
    """
    if drop_policy not in ("probs", "position"):
        raise ConfigError(f"drop_policy={drop_policy!r} is not supported; use probs or position")
    capacity = get_capacity(len(routing_probs) * router_topk, routing_probs.shape[1], capacity_factor)
    order = routing_probs if drop_policy == "probs" else routing_map.int()
    kept = order.argsort(dim=0, descending=True, stable=True)[:capacity]
    mask = torch.zeros_like(routing_map, dtype=torch.bool).scatter(0, kept, True)
    final = mask if pad_to_capacity else mask & routing_map
    return routing_probs * final, final


def fused_indices_to_multihot(
    indices: Tensor, probs_indices: Tensor, num_of_local_experts: int
) -> tuple[Tensor, Tensor]:
    """Experts ``[T, k]``, -1 for none, with probabilities -> (the choice as bool ``[T, E]``, the probabilities)."""
    # A further column takes the entries without an expert and is cut off.
    columns = torch.where(indices < 0, num_of_local_experts, indices).long()
    probs = probs_indices.new_zeros(len(indices), num_of_local_experts + 1)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter(1, columns, True)
    return chosen[:, :-1], probs.scatter(1, columns, probs_indices)[:, :-1]


class RouterGatingLinearFunction:
    """``router_gating_linear`` under Megatron's name, ``apply(input, weight, bias, router_dtype)``."""

    apply = staticmethod(router_gating_linear)


class RandomSTE(torch.autograd.Function):
    """Logits -> random numbers of the same shape, with the gradient of the logits, for benchmarks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        """Return numbers of this expert-parallel rank's generator."""
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            return logits.clone().normal_()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return grad_output


def apply_random_logits(logits: Tensor) -> Tensor:
    """Return ``RandomSTE.apply(logits)``."""
    return RandomSTE.apply(logits)


def save_to_aux_losses_tracker(
    name: str,
    loss: Tensor,
    layer_number: int | None,
    num_layers: int,
    reduce_group: Any = None,
    avg_group: Any = None,
    reduce_group_has_dp: bool = False,
) -> None:
    """Call ``record`` of the tracker of losses."""
    groups = reduce_group, avg_group, not reduce_group_has_dp
    get_moe_metrics_tracker().record(name, loss, layer_number, num_layers, *groups)


def clear_aux_losses_tracker() -> None:
    """Set the sums of the tracker of losses to 0."""
    get_moe_metrics_tracker().clear()


def reduce_aux_losses_tracker_across_ranks(track_names: list[str] | None = None, pg_collection: Any = None) -> None:
    """Sum and average the losses of the tracker over ranks; a collective call."""
    get_moe_metrics_tracker().sync(track_names, pg_collection)


def get_moe_layer_wise_logging_tracker() -> dict[str, dict[str, Any]]:
    """Return the entries of the tracker of losses as dictionaries, by name."""
    return {name: vars(entry) for name, entry in get_moe_metrics_tracker().metrics.items()}


def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    total_loss_dict: dict[str, Tensor] | None = None,
    **settings: Any,
) -> str:
    """Call ``report`` of the tracker of losses, with the same names of further arguments."""
    given = loss_scale, iteration, writer, wandb_writer
    return get_moe_metrics_tracker().report(*given, total_loss_dict=total_loss_dict, **settings)
