"""Settings of a layout from which ``drawn_rows`` draws, and the reasons why other settings are not drawn."""

from __future__ import annotations

from tests.parity.drawn_settings import FOLDER, Choices, Settings, crossed, either, on

# Dtypes of both sides, with the bounds of their rounding; most rows are in float64, which shows every defect.
BF16: Settings = {"fp64": False, "bf16": True}
PRECISE: Settings = BF16 | {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}
PRECISION: list[tuple[float, Choices]] = [
    (
        0.08,
        [
            *({"fp64": False}, BF16, BF16 | {"output_logit_dtype": "fp32"}, BF16 | {"fp32_residual_connection": True}),
            *({"fp64": False, "fp16": True, "loss_scale": 256.0}, BF16 | {"grad_reduce_in_bf16": True}),
            *crossed(
                PRECISE,
                exp_avg_dtype=("bf16",),
                exp_avg_sq_dtype=("bf16",),
                main_params_dtype=("bf16",),
            ),
        ],
    )
]

RECOMPUTE: Choices = [
    *({"recompute_granularity": "selective", "recompute_modules": (part,)} for part in ("core_attn", "layernorm")),
    *({"recompute_granularity": "selective", "recompute_modules": (part,)} for part in ("mlp", "moe", "mla_up_proj")),
    {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "moe_act", "shared_experts")},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
]
STAGES: Choices = [
    *either("num_virtual_stages_per_pipeline_rank", 2, 2, 2),
    *either("num_layers_per_virtual_pipeline_stage", 1),
    *either("decoder_first_pipeline_num_layers", 1, 2),
    *either("decoder_last_pipeline_num_layers", 1, 2),
    *on("account_for_embedding_in_pipeline_split"),
    *on("account_for_loss_in_pipeline_split"),
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    *either("pipeline_model_parallel_layout", "E|tL", "Et|tL", "E|t|t|L", "Ettt|tL", "Et|tt||L", "Et||t|tL"),
]
HIERARCHY: Settings = {"cp_comm_type": ("a2a+p2p",), "hierarchical_context_parallel_sizes": (2, 2)}
OFFLOAD: Settings = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}

# Settings of the layout only.
LAYOUT: list[tuple[float, Choices]] = [
    (0.6, either("pipeline_model_parallel_size", 2, 2, 4)),
    (0.4, either("tensor_model_parallel_size", 2, 4)),
    (0.5, either("context_parallel_size", 2, 4)),
    (0.5, STAGES),
    (0.4, either("pipeline_schedule", "gpipe", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "1f1b", "interleaved")),
    (0.2, [{"overlap_p2p_communication": False}]),
    (0.6, on("sequence_parallel")),
    (0.2, [{"tp_comm_overlap": False}]),
    (0.2, either("tp_comm_overlap_chunks", 2, 3)),
    (0.6, [*either("cp_comm_type", ("all_gather",), ("a2a",), ("a2a", "p2p")), HIERARCHY]),
    (0.6, either("zero_stage", 1, 2, 3)),
    (0.2, on("use_distributed_optimizer")),
    (0.1, either("data_parallel_sharding_strategy", "no_shard", "optim", "optim_grads", "optim_grads_params")),
    (0.5, on("overlap_grad_reduce")),
    (0.5, on("overlap_param_gather")),
    (0.3, on("zero3_keep_after_forward")),
    (0.3, either("num_distributed_optimizer_instances", 2)),
    (0.6, either("ddp_bucket_size", 1, 33, 500, 1024, 3000, 4097, 20_000, 1_000_000)),
    (0.3, either("rank_order", "pp-dp-tp-cp-ep", "tp-pp-dp-cp-ep", "dp-ep-cp-tp-pp")),
    (0.1, either("distributed_backend", "gloo")),
    (0.6, either("expert_model_parallel_size", 2, 4)),
    (0.4, either("expert_tensor_parallel_size", 1, 2)),
    (0.3, either("moe_token_dispatcher_type", "allgather")),
    (0.3, on("moe_shared_expert_overlap")),
    (0.3, on("overlap_moe_expert_parallel_comm")),
    (0.5, either("micro_batch_size", 2, 3, 4)),
    (0.4, RECOMPUTE),
    (0.2, [OFFLOAD]),
    (0.2, [{"optimizer_cpu_offload": True}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}]),
    (0.2, either("optimizer_offload_dir", f"{FOLDER}/state")),
    (0.3, either("zero3_param_offload_dir", f"{FOLDER}/weights")),
    (0.3, on("zero3_param_cpu_offload")),
    (0.3, [{"use_layer_wise_param_layout": False}]),
    (0.3, [{"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": kind} for kind in ("native", "linear")]),
    (0.2, either("kernel_backend", "reference")),
    (0.2, either("attention_backend", "unfused")),
    (0.1, on("apply_query_key_layer_scaling")),
    (0.5, on("fp8_param_gather")),
    (0.1, on("ddp_reduce_scatter_with_fp32_accumulation")),
    (0.1, on("poison_buffers")),
    (0.1, on("log_norms_by_layer")),
    (0.05, on("log_params_norm")),
    (0.05, on("log_num_zeros_in_grad")),
    (0.05, on("deterministic_mode")),
    (0.05, either("rerun_mode", "validate_results", "report_stats")),
    (0.05, on("check_pipeline_messages")),
    (0.3, either("num_workers", 0)),
]

# Settings of both sides whose legality depends on the layout.
JOINT: list[tuple[float, Choices]] = [
    # Its split products have errors of 1e-8 of the largest element.
    (0.1, crossed({"layout_invariant": True}, layout_invariant_parts=(2,), layout_invariant_chunks=(4,))),
    (
        0.08,
        [
            {"outer_steps": 2},
            {"outer_steps": 1},
            {"outer_steps": 2, "outer_lr": 1.0, "outer_groups": 4},
            {"outer_steps": 2, "outer_fragments": 2, "outer_delay": 1, "outer_alpha": 0.25, "outer_momentum": 0.8},
            *({"outer_steps": 1, "outer_exchange": kind} for kind in ("bf16", "fp8", "fp4")),
        ],
    ),
]

# Lossy settings, whose results belong to a layout: it is compared with itself without its switches.
FEW = {"grad_compression_warmup_iters": 1}
ONE_BIT: Settings = {"optimizer": "adam", "grad_compression": "onebit-adam"} | FEW
ONE_BIT_LAMB: Settings = {"optimizer": "lamb", "grad_compression": "onebit-lamb"} | FEW
ZERO_ONE: Settings = {"optimizer": "adam", "grad_compression": "zero-one-adam"}
POWER: Settings = {"grad_compression": "powersgd"} | FEW
LOSSY: list[tuple[float, Choices]] = [
    (
        0.06,
        [
            *(POWER, POWER, POWER | {"powersgd_rank": 2}, ONE_BIT),
            *crossed(
                ONE_BIT_LAMB,
                onebit_lamb_coeff_beta=(0.5,),
                onebit_lamb_factor_max=(2.0,),
                onebit_lamb_factor_min=(0.8,),
                onebit_lamb_factor_threshold=(0.05,),
            ),
            *crossed(
                ZERO_ONE | {"zero_one_var_freeze_step": 1},
                zero_one_local_step_clipper=(2,),
                zero_one_local_step_scaler=(1,),
            ),
            ZERO_ONE | {"zero_one_var_update_scaler": 1},
        ],
    ),
]

NOT_DRAWN: dict[str, str] = {
    "a name or a condition that other settings imply": "attention_kind hf_token_ids changed_model_settings",
    "a file of actions for one number of stages: tests/training": "pipeline_plan",
    "a file or a folder from which a run starts, or a vocabulary: tests of hub, checkpoints, tokenizers": """
        load load_hf hf_model_type lora_load pretrained_checkpoint tokenizer_model vocab_file merge_file
        tiktoken_pattern tiktoken_num_special_tokens chat_template_date""",
    "a resume, which the comparison of two steps does not have: verify/resumed.py": """
        save save_interval save_retain_interval keep_last overwrite_checkpoints ckpt_format ckpt_format_interval
        async_save non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_dir replication replication_jump replication_factor verify_checkpoint ckpt_step
        use_checkpoint_args use_checkpoint_opt_param_scheduler override_opt_param_scheduler finetune no_load_optim
        no_save_optim exit_on_missing_checkpoint""",
    "the samples are a function of the index: tests/datasets and tests of the features compare them": """
        data_args_path train_data_path valid_data_path test_data_path multiple_validation_sets validation_set_names
        full_validation per_split_data_args_path data_phases data_order dataloader_type num_dataset_builder_threads
        data_cache_path mid_level_dataset_surplus choices_data_path fim_data fim_rate fim_spm_rate fim_split_sample
        fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token
        fim_eod_token""",
    "the loop around steps, which a row does not run": """
        skip_train eval_interval start_eval_at_iter eval_iters exit_interval exit_duration_in_mins
        check_for_nan_in_loss_and_grad iterations_to_skip max_bad_steps max_rollbacks spike_factor save_bad_steps""",
    "it needs a GPU, or compiles for many seconds: tests/features/compilation, make gpu": """
        cuda_graph_impl cuda_graph_modules cuda_graph_warmup_steps compile compile_backend
        disable_bf16_reduced_precision_matmul muon_fp32_matmul_prec""",
    "a course over more than two steps: tests/optimizer": """
        initial_loss_scale min_loss_scale loss_scale_window hysteresis""",
    "results of Megatron-LM, two of which depend on the micro-batches: tests/plain": """
        calculate_per_token_loss moe_capacity_per positions_as_matrices""",
    "rows of tests/parity and tests/plain have it": """
        zero3_param_persistence_threshold moe_router_quantile_balancing_ema dynamic_context_parallel
        max_seqlen_per_dp_cp_rank min_dynamic_context_parallel_size""",
    "a model without losses of the next token: tests/post_training/test_critics.py": "value_head",
    "reports": """
        log_interval log_format log_max_attention_logit quiet metrics_file progress trace_pipeline peak_tflops
        timing_log_level timing_log_option log_straggler straggler_minmax_count fp8_statistics_interval tensorboard_dir
        prometheus_file wandb_project wandb_exp_name wandb_entity wandb_save_dir mlflow_experiment mlflow_run_name
        mlflow_tracking_uri profile profile_step_start profile_step_end profile_ranks profile_dir use_pytorch_profiler
        pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack record_hashes record_hashes_interval
        record_hashes_by_tensor replica_check_interval link_check_interval distributed_timeout_minutes""",
    "faults and their recovery: tests/resilience": """
        elastic recover recover_without_spare recover_mirror recover_join replay_interval error_injection_rate
        error_injection_type inject_fault""",
}
"""Settings that no row has, by the reason."""
