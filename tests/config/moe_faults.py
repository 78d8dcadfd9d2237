"""Faulty settings of experts, in the form of ``faults.FAULTS``."""

from __future__ import annotations

from typing import Any

MOE = {"num_experts": 4, "disable_bias_linear": True}
SIGMOID = {"moe_router_score_function": "sigmoid"}
SPARSEMIXER = {"moe_router_score_function": "sparsemixer"}
CAPACITY = {"moe_expert_capacity_factor": 1.0}
QUANTILES = {"moe_router_load_balancing_type": "quantile_balancing"}
SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
PAIRS = {"overlap_moe_expert_parallel_comm": True, "expert_model_parallel_size": 2}


def groups(num_groups: int | None, topk: int | None) -> dict[str, Any]:
    """Group-limited routing."""
    return {"moe_router_num_groups": num_groups, "moe_router_group_topk": topk}


MOE_FAULTS: list[tuple[dict[str, Any], int, tuple[str, ...]]] = [
    ({"moe_router_topk": 4}, 1, ("moe_router_topk=4 has no effect", "--num-experts")),
    ({"expert_model_parallel_size": 2}, 2, ("expert_model_parallel_size=2 has no effect", "--num-experts")),
    (
        MOE | {"swiglu": True, "mlp_multipliers": (1.0, 2.0)},
        1,
        ("mlp_multipliers=(1.0, 2.0)", "remove --mlp-multipliers"),
    ),
    ({"num_experts": 4, "moe_latent_size": 8}, 1, ("moe_latent_size=8", "--disable-bias-linear")),
    (MOE | {"moe_latent_size": 8, "use_mup": True}, 1, ("use_mup=True", "moe_latent_size=8", "--use-mup")),
    (MOE | {"moe_latent_size": 8, "layout_invariant": True}, 1, ("layout_invariant=True", "moe_latent_size=8")),
    ({"moe_latent_size": 8}, 1, ("moe_latent_size=8", "--num-experts")),
    (MOE | {"num_experts": 0}, 1, ("num_experts=0", "an integer from 1 to 65,536")),
    (MOE | {"moe_z_loss_coeff": -1.0}, 1, ("moe_z_loss_coeff=-1.0", ">= 0 and <= 3e+38")),
    (MOE | {"moe_input_jitter_eps": 1.0}, 1, ("moe_input_jitter_eps=1.0", ">= 0 and < 1")),
    (MOE | {"moe_expert_capacity_factor": 0.0}, 1, ("moe_expert_capacity_factor=0.0", "> 0 and <= 65,536")),
    (
        {"num_experts": 4, "moe_shared_expert_intermediate_size": 16},
        1,
        ("disable_bias_linear=False", "shared experts", "--disable-bias-linear", "--add-qkv-bias"),
    ),
    (MOE | {"moe_layer_freq": (0,)}, 1, ("moe_layer_freq=(0,)", "1 or more")),
    (MOE | {"moe_layer_freq": (0, 0)}, 1, ("num_experts=4 has no effect", "moe_layer_freq=(0, 0)", "write a 1")),
    (MOE | {"moe_layer_freq": (0, 1, 1)}, 1, ("moe_layer_freq=(0, 1, 1)", "num_layers=2")),
    (
        MOE | {"moe_shared_expert_gate": True},
        1,
        ("moe_shared_expert_gate=True", "--moe-shared-expert-intermediate-size"),
    ),
    (
        MOE | {"moe_shared_expert_intermediate_size": 9, "tensor_model_parallel_size": 2},
        2,
        ("moe_shared_expert_intermediate_size=9", "legal: 1, 3, 9"),
    ),
    (MOE | {"moe_router_topk": 5}, 1, ("moe_router_topk=5", "num_experts=4", "1 to 4")),
    (MOE | groups(2, None), 1, ("moe_router_num_groups=2", "moe_router_group_topk=None", "both or none")),
    (MOE | groups(3, 1), 1, ("num_experts=4", "moe_router_num_groups=3", "1, 2, 4")),
    (MOE | groups(2, 3), 1, ("moe_router_group_topk=3", "1 to 2")),
    (MOE | groups(4, 1), 1, ("moe_router_topk=2", "moe_router_group_topk=1 groups of 1", "up to 1")),
    (MOE | groups(2, 2) | {"moe_router_topk": 3}, 1, ("moe_router_topk=3", "multiples of 2 up to 4")),
    (MOE | {"moe_router_topk": 1}, 1, ("moe_router_topk=1", "learn nothing", "--moe-router-pre-softmax")),
    (
        MOE | groups(2, 1) | {"moe_router_group_score_topk": 3},
        1,
        ("moe_router_group_score_topk=3", "2 experts of a group", "1 to 2"),
    ),
    (
        MOE | groups(2, 1) | {"moe_router_group_score_topk": 1, "moe_router_topk": 3},
        1,
        ("moe_router_topk=3", "moe_router_group_topk=1 groups of 2", "legal: 1 to 2"),
    ),
    (MOE | {"moe_router_group_score_topk": 1}, 1, ("moe_router_group_score_topk=1", "--moe-router-group-topk")),
    (
        MOE | {"moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "sinkhorn"},
        1,
        ("moe_router_enable_expert_bias=True", "types without sinkhorn"),
    ),
    (
        MOE | SIGMOID | {"moe_router_bias_update_rate": 0.1},
        1,
        ("moe_router_bias_update_rate=0.1", "--moe-router-enable-expert-bias"),
    ),
    (
        MOE | {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
        1,
        ("moe_aux_loss_coeff=0.1", "--moe-router-load-balancing-type seq_aux_loss"),
    ),
    (
        MOE | QUANTILES | {"moe_router_enable_expert_bias": True},
        1,
        ("moe_router_enable_expert_bias=True", "its own bias"),
    ),
    (MOE | QUANTILES | {"moe_router_topk": 4}, 1, ("moe_router_topk=4 must be less than num_experts=4",)),
    (MOE | QUANTILES | SPARSEMIXER, 1, ("have their own choices; remove one",)),
    (MOE | QUANTILES | {"layout_invariant": True}, 1, ("layout_invariant=True", "are not exact sums")),
    (MOE | SPARSEMIXER | {"moe_router_enable_expert_bias": True}, 1, ("by the logits alone", "remove one of them")),
    (MOE | SPARSEMIXER | groups(2, 1), 1, ("moe_router_num_groups=2", "sparsemixer", "remove one of them")),
    (MOE | {"moe_sparsemixer_sampling": True}, 1, ("moe_sparsemixer_sampling=True", "--moe-router-score-function")),
    (MOE | {"moe_sparsemixer_threshold": 0.1}, 1, ("moe_sparsemixer_threshold=0.1", "--moe-router-score-function")),
    (MOE | {"moe_router_sum_epsilon": 0.1}, 1, ("moe_router_sum_epsilon=0.1", "sigmoid or sqrtsoftplus")),
    (MOE | SINKHORN | SIGMOID, 1, ("moe_router_load_balancing_type=sinkhorn", "remove")),
    (MOE | SINKHORN | CAPACITY, 1, ("moe_expert_capacity_factor=1.0", "sinkhorn", "seq_aux_loss")),
    (
        MOE | {"moe_token_drop_policy": "position"},
        1,
        ("moe_token_drop_policy=position", "--moe-expert-capacity-factor"),
    ),
    (
        MOE
        | {
            "moe_shared_expert_overlap": True,
            "moe_shared_expert_intermediate_size": 16,
            "moe_token_dispatcher_type": "allgather",
        },
        1,
        ("moe_shared_expert_overlap=True", "alltoall"),
    ),
    (
        MOE | {"moe_pad_expert_input_to_capacity": True},
        1,
        ("moe_pad_expert_input_to_capacity=True", "--moe-expert-capacity-factor"),
    ),
    (
        MOE | PAIRS | {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb_h1"},
        4,
        ("overlap_moe_expert_parallel_comm=True", "pipeline_schedule=zb_h1", "legal: 1f1b, interleaved, dualpipe_v"),
    ),
    (
        MOE | PAIRS | {"moe_token_dispatcher_type": "allgather"},
        2,
        ("overlap_moe_expert_parallel_comm=True", "not allgather"),
    ),
    (
        MOE | PAIRS | {"pipeline_model_parallel_size": 2, "pipeline_plan": "my_plan.txt"},
        4,
        ("overlap_moe_expert_parallel_comm=True", "pipeline_plan=my_plan.txt", "0F1&0B0"),
    ),
    (MOE | {"expert_model_parallel_size": 3}, 3, ("num_experts=4", "expert_model_parallel_size=3", "1, 2, 4")),
    (
        MOE | {"moe_ffn_hidden_size": 15, "tensor_model_parallel_size": 2},
        2,
        ("moe_ffn_hidden_size=15", "expert_tensor_parallel_size=2", "the default is", "1, 3, 5, 15"),
    ),
]
