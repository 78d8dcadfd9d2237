"""Rules for experts: the router, its balance, capacity, and exchanges."""

from collections.abc import Iterator

from megatron_core.config.rule_helpers import divisors, uneven
from megatron_core.config.run import RunConfig
from megatron_core.features.experts.settings import MoEConfig


def moe_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of experts that contradict each other or the layout."""
    model = config.model.section(MoEConfig)
    if model.num_experts is None:
        return
    if model.num_experts < 1 or model.moe_router_topk < 1:
        return  # reported as out of range
    if model.add_bias_linear and model.moe_shared_expert_intermediate_size is not None:
        yield (
            "disable_bias_linear=False, but shared experts have no biases; add --disable-bias-linear, and "
            "--add-qkv-bias if the QKV projection is to keep its own"
        )
    yield from _layer_problems(model)
    yield from _choice_problems(model)
    yield from _balance_problems(model)
    yield from _capacity_problems(model)
    if model.moe_router_load_balancing_type == "quantile_balancing":
        yield from _quantile_problems(model, layout_invariant=config.parallel.layout_invariant)
    if model.moe_latent_size is not None:
        yield from _latent_problems(model, layout_invariant=config.parallel.layout_invariant)
    yield from _split_problems(config, model)


def _layer_problems(model: MoEConfig) -> Iterator[str]:
    """Which layers have experts, and the shared ones."""
    pattern = model.moe_layer_freq
    if len(pattern) == 1 and pattern[0] < 1:
        yield f"moe_layer_freq={pattern} must be 1 or more: layers 0, n, 2n, ... have experts"
    elif len(pattern) != 1 and (len(pattern) != model.num_layers or set(pattern) - {0, 1}):
        yield (
            f"moe_layer_freq={pattern} must be one number n (layers 0, n, 2n, ... have experts), or 1 (experts) or 0 "
            f"(dense) for each of num_layers={model.num_layers}"
        )
    elif model.may_have_feed_forward("experts") and not model.expert_layers:
        yield (
            f"num_experts={model.num_experts} has no effect with moe_layer_freq={pattern}, which gives no layer "
            "experts; write a 1 for each layer with experts, or remove --num-experts"
        )
    if model.mlp_multipliers != (1.0, 1.0):
        yield (
            f"mlp_multipliers={model.mlp_multipliers} cannot be used with num_experts={model.num_experts}, to which "
            "they do not apply; remove --mlp-multipliers"
        )
    has_shared = model.moe_shared_expert_intermediate_size is not None
    if model.moe_shared_expert_overlap and has_shared and model.moe_token_dispatcher_type != "alltoall":
        yield (
            f"moe_shared_expert_overlap=True overlaps with moe_token_dispatcher_type=alltoall alone, not with "
            f"{model.moe_token_dispatcher_type}; choose that or remove --moe-shared-expert-overlap"
        )


def _choice_problems(model: MoEConfig) -> Iterator[str]:
    """The router's choice."""
    experts, k = model.num_experts or 1, model.moe_router_topk
    groups, group_topk = model.moe_router_num_groups, model.moe_router_group_topk
    softmax = model.moe_router_score_function == "softmax"
    if k > experts:
        yield f"moe_router_topk={k} is more than num_experts={experts}; legal: 1 to {experts}"
    if model.moe_apply_probs_on_input and k != 1:
        yield f"moe_apply_probs_on_input=True needs moe_router_topk=1, because a token has one input; it is {k}"
    if (groups is None) != (group_topk is None):
        yield (
            f"moe_router_num_groups={groups} and moe_router_group_topk={group_topk} go together; "
            "give both or none of them"
        )
    elif groups is not None and group_topk is not None and min(groups, group_topk) >= 1:
        yield from _group_problems(model, experts, groups, group_topk)
    if softmax and k == 1 and not model.moe_router_pre_softmax and not _is_sinkhorn(model):
        yield (
            "moe_router_topk=1: the softmax over one chosen expert is always 1, so the router would learn "
            "nothing; add --moe-router-pre-softmax, or use --moe-router-score-function sigmoid"
        )
    if model.moe_router_score_function == "sparsemixer":
        for name in ("moe_router_enable_expert_bias", "moe_router_num_groups"):
            if value := getattr(model, name):
                yield (
                    f"{name}={value} cannot be used with moe_router_score_function=sparsemixer, which chooses by the "
                    "logits alone; remove one of them"
                )
    if model.moe_router_enable_expert_bias and _is_sinkhorn(model):
        yield (
            "moe_router_enable_expert_bias=True cannot be used with moe_router_load_balancing_type="
            f"{model.moe_router_load_balancing_type}; legal: types without sinkhorn"
        )


def _group_problems(model: MoEConfig, experts: int, groups: int, group_topk: int) -> Iterator[str]:
    """Group-limited routing."""
    k, counted = model.moe_router_topk, model.moe_router_group_score_topk
    if experts % groups:
        yield (
            f"num_experts={experts} cannot be split into moe_router_num_groups={groups}; "
            f"legal: {', '.join(map(str, divisors(experts)))}"
        )
    elif group_topk > groups:
        yield f"moe_router_group_topk={group_topk} is more than moe_router_num_groups={groups}; legal: 1 to {groups}"
    elif counted is not None and counted > experts // groups:
        yield (
            f"moe_router_group_score_topk={counted} is more than the {experts // groups} experts of a group; "
            f"legal: 1 to {experts // groups}"
        )
    elif counted is not None and k > group_topk * (experts // groups):
        yield (
            f"moe_router_topk={k} experts cannot come from moe_router_group_topk={group_topk} groups of "
            f"{experts // groups}; legal: 1 to {group_topk * (experts // groups)}"
        )
    elif counted is None and (k % group_topk or k > group_topk * (experts // groups)):
        yield (
            f"moe_router_topk={k} experts cannot come from moe_router_group_topk={group_topk} groups of "
            f"{experts // groups}; legal: multiples of {group_topk} up to {group_topk * (experts // groups)}"
        )


def _is_sinkhorn(model: MoEConfig) -> bool:
    return model.moe_router_load_balancing_type.endswith("sinkhorn")


def _quantile_problems(model: MoEConfig, *, layout_invariant: bool) -> Iterator[str]:
    """The bias of quantile_balancing."""
    balance = f"moe_router_load_balancing_type={model.moe_router_load_balancing_type}"
    for name in ("moe_router_enable_expert_bias", "moe_router_num_groups"):
        if value := getattr(model, name):
            yield f"{name}={value} cannot be used with {balance}, which has its own bias; remove one of them"
    if model.moe_router_score_function == "sparsemixer":
        yield f"moe_router_score_function=sparsemixer and {balance} have their own choices; remove one of them"
    if model.moe_router_topk >= (model.num_experts or 0):
        k = model.moe_router_topk
        experts = model.num_experts
        yield f"moe_router_topk={k} must be less than num_experts={experts} with {balance}; give a smaller number"
    if layout_invariant:
        yield f"layout_invariant=True cannot be used with {balance}, whose means are not exact sums; remove one of them"


def _balance_problems(model: MoEConfig) -> Iterator[str]:
    """Load balancing."""
    balance = model.moe_router_load_balancing_type
    if _is_sinkhorn(model) and (model.moe_router_num_groups or model.moe_router_score_function != "softmax"):
        yield (
            f"moe_router_load_balancing_type={balance} has its own scores and no groups; remove "
            "moe_router_score_function, moe_router_num_groups and moe_router_group_topk"
        )

    added_types = model.moe_further_balancing_types
    if len(added_types) != len(model.moe_further_aux_loss_coeffs):
        yield (
            f"moe_further_balancing_types={added_types} and moe_further_aux_loss_coeffs="
            f"{model.moe_further_aux_loss_coeffs} must have the same length; give one coefficient for each type"
        )
    if added_types and (len({balance, *added_types}) != 1 + len(added_types) or not model.balancing_loss):
        yield (
            f"moe_further_balancing_types={added_types} and moe_router_load_balancing_type={balance} must be different "
            "losses, the first with moe_aux_loss_coeff > 0; remove the repeated type or the one with coefficient 0"
        )


def _capacity_problems(model: MoEConfig) -> Iterator[str]:
    """Rules for expert capacity."""
    factor, balance = model.moe_expert_capacity_factor, model.moe_router_load_balancing_type
    if factor is not None and _is_sinkhorn(model):
        yield (
            f"moe_expert_capacity_factor={factor} cannot be used with moe_router_load_balancing_type={balance}; legal: "
            "seq_aux_loss, aux_loss, global_aux_loss, none"
        )


def _latent_problems(model: MoEConfig, *, layout_invariant: bool) -> Iterator[str]:
    """Settings that experts with projections of their inputs and outputs do not support."""
    latent = f"moe_latent_size={model.moe_latent_size}"
    if model.add_bias_linear:
        yield f"{latent} needs linear layers without biases; add --disable-bias-linear"
    if layout_invariant:
        yield (
            f"layout_invariant=True cannot be used with {latent}: the projections' gradients are not exact sums; "
            "remove --layout-invariant"
        )


def _split_problems(config: RunConfig, model: MoEConfig) -> Iterator[str]:
    """Experts and their widths that cannot be split evenly over ranks."""
    parallel = config.parallel
    if (shared := model.moe_shared_expert_intermediate_size) is not None:
        tp = parallel.tensor_model_parallel_size
        yield from uneven("moe_shared_expert_intermediate_size", shared, "tensor_model_parallel_size", tp)
    size = parallel.expert_model_parallel_size
    yield from uneven("num_experts", model.num_experts or 1, "expert_model_parallel_size", size)
    yield from uneven(
        "moe_ffn_hidden_size",
        model.expert_ffn_size,
        "expert_tensor_parallel_size",
        parallel.expert_tensor_size,
        " (the default is tensor_model_parallel_size)",
    )
