"""Rows of the parity matrix with experts, in the form of ``rows.ROWS``."""

from __future__ import annotations

SMALL = {
    "num_layers": 2,
    "global_batch_size": 4,
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "ffn_hidden_size": 48,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
MIXTRAL = SMALL | {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
DEEPSEEK = SMALL | {
    "num_layers": 3,
    "num_experts": 8,
    "moe_layer_freq": (0, 1, 1),
    "moe_router_score_function": "sigmoid",
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
    "moe_shared_expert_intermediate_size": 16,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 0.1,
}
BY_MICRO_BATCH = {"moe_router_load_balancing_type": "aux_loss", "micro_batch_size": 2}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "micro_batch_size": 2}
SINKHORN = SMALL | {"moe_router_load_balancing_type": "seq_sinkhorn", "moe_input_jitter_eps": 0.1}
SINKHORN_OF_MICRO_BATCHES = SMALL | {"moe_router_load_balancing_type": "sinkhorn", "micro_batch_size": 2}
QUANTILES = SMALL | {"moe_router_load_balancing_type": "quantile_balancing", "micro_batch_size": 2}
QUANTILES |= {"moe_router_quantile_balancing_ema": 0.3, "global_batch_size": 8}
SQRT = {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 1}
LLAMA4 = MIXTRAL | {
    "moe_router_topk": 1,
    "moe_router_score_function": "sigmoid",
    "moe_apply_probs_on_input": True,
    "moe_shared_expert_intermediate_size": 16,
}
TWO_LOSSES = {"moe_further_balancing_types": ("global_aux_loss",), "moe_further_aux_loss_coeffs": (0.3,)}
LATENT_EXPERTS = {"moe_latent_size": 10}
DROP = {"moe_expert_capacity_factor": 0.75}
PADDED = DROP | {"moe_pad_expert_input_to_capacity": True}
THIRDS = {"hidden_size": 24, "num_attention_heads": 3, "num_experts": 3, "moe_expert_capacity_factor": 2.5}
BY_POSITION = DROP | {"moe_token_drop_policy": "position"}
FP64_ROUTER = {"moe_router_dtype": "fp64", "moe_router_pre_softmax": True}

EP2, EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
ETP1, ETP2 = {"expert_tensor_parallel_size": 1}, {"expert_tensor_parallel_size": 2}
TP3 = {"tensor_model_parallel_size": 3, "expert_model_parallel_size": 3}
TP2, PP2, SP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}
ZERO = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 3000}
ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
PAIRS, DUALPIPE_V = {"overlap_moe_expert_parallel_comm": True}, {"pipeline_schedule": "dualpipe_v"}
IN_FOUR = DEEPSEEK | {"num_layers": 4, "moe_layer_freq": (2,), "global_batch_size": 8}
ZB_H1, ZB_V = {"pipeline_schedule": "zb_h1"}, {"pipeline_schedule": "zb_v"}

MOE_ROWS: dict[str, tuple[int, dict, dict]] = {
    "experts, ep2": (2, MIXTRAL, EP2),
    "experts, tp2": (2, MIXTRAL, TP2),
    "experts, tp2 sp ep2 etp1": (2, MIXTRAL, TP2 | SP | EP2 | ETP1),
    "probabilities on inputs, tp2 sp ep2 etp1": (2, LLAMA4, TP2 | SP | EP2 | ETP1),
    "probabilities on inputs, etp2": (2, LLAMA4, ETP2),
    "two balancing losses, tp2 sp ep2 etp1": (2, MIXTRAL | TWO_LOSSES | {"micro_batch_size": 2}, TP2 | SP | EP2 | ETP1),
    "experts, etp2, allgather": (2, MIXTRAL, ETP2 | ALL_GATHER),
    "experts, dp2 tp2 ep2 zero1": (4, MIXTRAL, TP2 | EP2 | ZERO),
    "experts, muon, gate and up apart, dp2 tp2 ep2 etp1 zero1": (
        4,
        MIXTRAL | {"optimizer": "muon", "muon_split_gate_up": True},
        TP2 | EP2 | ETP1 | ZERO,
    ),
    "experts, dp4 ep2 zero1, overlap": (4, MIXTRAL, EP2 | ZERO | OVERLAP),
    "experts, dp4 ep2 zero3, overlap": (4, MIXTRAL, EP2 | {"zero_stage": 3} | OVERLAP),
    "bias and groups, dp2 pp2 ep2 zb_v zero3": (
        4,
        DEEPSEEK | {"num_layers": 4, "moe_layer_freq": (2,)},
        PP2 | EP2 | ZB_V | {"zero_stage": 3},
    ),
    "latent experts, tp2": (2, MIXTRAL | LATENT_EXPERTS, TP2),
    "latent experts, etp2, allgather": (2, MIXTRAL | LATENT_EXPERTS, ETP2 | ALL_GATHER),
    "latent experts, tp2 sp ep2 etp1, recompute": (2, DEEPSEEK | LATENT_EXPERTS, TP2 | SP | EP2 | ETP1 | RECOMPUTE),
    "latent experts, dp2 pp2 ep2 zb_v zero3": (
        4,
        DEEPSEEK | LATENT_EXPERTS | {"num_layers": 4, "moe_layer_freq": (2,)},
        PP2 | EP2 | ZB_V | {"zero_stage": 3},
    ),
    "latent experts, shared experts while tokens travel, ep2, in pairs": (
        2,
        DEEPSEEK | LATENT_EXPERTS,
        EP2 | PAIRS | {"moe_shared_expert_overlap": True},
    ),
    "experts, a rank without a token that counts, ep4": (4, MIXTRAL, EP4),  # C3
    "bias and groups, tp2 sp ep2 etp1, recompute": (2, DEEPSEEK, TP2 | SP | EP2 | ETP1 | RECOMPUTE),
    "bias and groups, pp2, a stage without experts": (
        2,
        DEEPSEEK | {"num_layers": 2, "moe_layer_freq": (0, 1)},
        PP2,
    ),  # C41
    "bias and groups, dp2 pp2 ep2 zb_v": (4, DEEPSEEK | {"num_layers": 4, "moe_layer_freq": (2,)}, PP2 | EP2 | ZB_V),
    "shared experts while tokens travel, ep2": (2, DEEPSEEK, EP2 | {"moe_shared_expert_overlap": True}),
    "experts, ep2, in pairs": (2, MIXTRAL, EP2 | PAIRS),
    "capacity and shared experts, ep2 zero2, recompute, in pairs": (
        2,
        DEEPSEEK | DROP,
        EP2 | PAIRS | RECOMPUTE | {"zero_stage": 2, "moe_shared_expert_overlap": True},
    ),
    "bias and groups, dp2 pp2 ep2 dualpipe_v in pairs": (4, IN_FOUR, PP2 | EP2 | DUALPIPE_V | PAIRS),
    "bias and groups, dp2 pp2 ep2 dualpipe_v in pairs, zero3": (
        4,
        IN_FOUR,
        PP2 | EP2 | DUALPIPE_V | PAIRS | {"zero_stage": 3},
    ),
    "experts, dp2 pp2 ep2, interleaved in pairs": (
        4,
        MIXTRAL | {"num_layers": 4, "global_batch_size": 8},
        PP2 | EP2 | PAIRS | {"num_virtual_stages_per_pipeline_rank": 2},
    ),
    "experts, cp2 ep2": (2, MIXTRAL, CP2 | EP2),
    "capacity, tp2 ep2 etp1": (2, MIXTRAL | DROP, TP2 | EP2 | ETP1),
    "capacity with padding, tp2 sp": (2, MIXTRAL | PADDED, TP2 | SP),
    # 16 tokens: the ranks have slices of 5, 5 and 6
    "capacity with padding, unequal slices, tp3 ep3 etp1": (3, MIXTRAL | PADDED | THIRDS, TP3 | ETP1),
    "sinkhorn and jitter, tp2 sp ep2 etp1": (2, SINKHORN, TP2 | SP | EP2 | ETP1),
    "balance of micro-batches, tp2 sp": (2, MIXTRAL | BY_MICRO_BATCH, TP2 | SP),
    "balance of the global batch, tp2 sp": (2, MIXTRAL | GLOBAL, TP2 | SP),
    "sinkhorn of micro-batches, cp2 tp2 sp ep2 etp1": (4, SINKHORN_OF_MICRO_BATCHES, CP2 | TP2 | SP | EP2 | ETP1),
    "quantiles, dp2 ep2 zero1": (2, QUANTILES, EP2 | ZERO),
    "quantiles, cp2 tp2 sp ep2 etp1": (4, QUANTILES, CP2 | TP2 | SP | EP2 | ETP1),
    "quantiles, full recompute, pp2": (2, QUANTILES, PP2 | RECOMPUTE),
    "experts, ep2, allgather": (2, MIXTRAL, EP2 | ALL_GATHER),
    "experts, tp2 etp1": (2, MIXTRAL, TP2 | ETP1),
    "experts, dp2 etp2 ep2": (4, MIXTRAL, ETP2 | EP2),
    "experts, dp2 tp2 sp ep4 etp1": (4, MIXTRAL, TP2 | SP | EP4 | ETP1),
    "experts, cp2 tp2 etp1 ep2, allgather": (4, SINKHORN, CP2 | TP2 | EP2 | ETP1 | ALL_GATHER),
    "capacity, cp2 tp2 sp ep2 etp1": (4, MIXTRAL | DROP, CP2 | TP2 | SP | EP2 | ETP1),
    "bias and groups, dp2 cp2 ep4 zero1": (4, DEEPSEEK, CP2 | EP4 | ZERO),
    "balance of the global batch, cp2 tp2 sp": (4, MIXTRAL | GLOBAL, CP2 | TP2 | SP),
    "experts, tp4 ep2 etp2": (4, MIXTRAL, TP4 | EP2 | ETP2),
    "experts, dp2 pp2 ep2 zb_h1 zero1": (4, MIXTRAL, PP2 | EP2 | ZB_H1 | ZERO),
    "experts, dp2 tp2 pp2 ep2 etp1 sp zero1": (8, MIXTRAL, TP2 | SP | PP2 | EP2 | ETP1 | ZERO | OVERLAP),
    "experts, rank order pp-dp-tp": (8, MIXTRAL, TP2 | PP2 | EP2 | ETP1 | {"rank_order": "pp-dp-tp-cp-ep"}),  # C50
    "one expert a token, ep2": (2, MIXTRAL | SQRT, EP2),
    "softmax before the choice, ep2": (2, MIXTRAL | FP64_ROUTER, EP2),
    "bias and groups, ep4": (4, DEEPSEEK, EP4),
    "capacity by position, tp2 sp ep2 zero1": (4, MIXTRAL | BY_POSITION, TP2 | SP | EP2 | ZERO),
    "capacity with padding, dp2 tp2 ep2 etp1, allgather": (4, MIXTRAL | PADDED, TP2 | EP2 | ETP1 | ALL_GATHER),
    "capacity with padding, dp2 tp2 ep4 etp1": (4, MIXTRAL | PADDED, TP2 | EP4 | ETP1),
}
