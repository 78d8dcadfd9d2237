"""Tables of the other flags that a launch script for Megatron-LM may contain, and their meaning here.

Names are written with underscores and without the leading hyphens. Flags that are fields of ``RunConfig`` have
Megatron-LM's meaning and are not listed.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


SAME_AS: dict[str, tuple[str, ...]] = {
    "no_async_tensor_model_parallel_allreduce": ("--no-tp-comm-overlap",),
    "recompute_activations": ("--recompute-granularity", "selective"),
    "use_rotary_position_embeddings": ("--position-embedding-type", "rope"),
    "use_tp_pp_dp_mapping": ("--rank-order", "tp-cp-ep-pp-dp"),
}
"""Switches that are equivalent to a flag of this project."""

RENAMED: dict[str, str] = {
    "check_weight_hash_across_dp_replicas_interval": "replica_check_interval",
}
"""Flags with a value that have another name here."""

OVERRIDDEN_BY_FLAG: dict[str, tuple[str, ...]] = {
    # Scripts for Llama pass it together with rotary positions, where it must not change anything.
    "no_position_embedding": ("--position-embedding-type", "none"),
}
"""As ``SAME_AS``, but an explicit flag overrides it, also one that comes earlier."""

SAME_VALUE: dict[str, dict[str, str]] = {
    # torch's scaled_dot_product_attention selects its kernel, the flash one if possible.
    "attention_backend": {"flash": "auto", "fused": "auto", "local": "unfused"},
    # Transformer Engine's kernel computes the same.
    "cross_entropy_fusion_impl": {"te": "native"},
    "tokenizer_type": {"GPTSentencePieceTokenizer": "SentencePieceTokenizer"},
}
"""Values of a shared flag that have another name here."""

LISTS: frozenset[str] = frozenset({"window_size", "window_attn_skip_freq", "moe_layer_freq"})
"""Shared flags whose values may be one Python expression of numbers, lists, + and *: ``127,0``, ``([1]*3+[0])*2``."""

SWITCHES_WITHOUT_EFFECT: dict[str, str] = {
    "accumulate_allreduce_grads_in_fp32": "main gradients are float32",
    "async_save": "checkpoints are written before the next step",
    "attention_softmax_in_fp32": "softmax is taken in float32",
    "auto_detect_ckpt_format": "there is one checkpoint format",
    "calculate_per_token_loss": "the loss is always the mean over the tokens of the global batch",
    "ckpt_assume_constant_structure": "there is one checkpoint format",
    "ckpt_fully_parallel_load": "every rank reads what it needs",
    "disable_gloo_process_groups": "groups are made as they are needed",
    "disable_jit_fuser": "--kernel-backend selects kernels",
    "lazy_mpu_init": "there is one order of initialisation",
    "log_memory_to_tensorboard": "always logged",
    "log_num_zeros_in_grad": "not logged",
    "log_params_norm": "not logged",
    "log_progress": "always logged",
    "log_throughput": "always logged",
    "log_timers_to_tensorboard": "always logged",
    "log_validation_ppl_to_tensorboard": "always logged",
    "log_world_size_to_tensorboard": "not logged",
    "manual_gc": "Python's garbage collector is not changed",
    "moe_grouped_gemm": "experts are always one grouped product",
    "moe_per_layer_logging": "the load of each layer is always logged",
    "moe_permute_fusion": "there is one way to sort tokens by expert",
    "moe_router_fusion": "there is one implementation of the router",
    "moe_shared_expert_overlap": "shared experts are computed before tokens are sent",
    "no_bias_dropout_fusion": "--kernel-backend selects kernels",
    "no_bias_gelu_fusion": "--kernel-backend selects kernels",
    "no_bias_swiglu_fusion": "--kernel-backend selects kernels",
    "no_ckpt_fully_parallel_save": "every rank writes what it owns",
    "no_create_attention_mask_in_dataloader": "masks are never made by the loader",
    "no_gradient_accumulation_fusion": "--kernel-backend selects kernels",
    "no_load_rng": "no generator states are kept",
    "no_masked_softmax_fusion": "--kernel-backend selects kernels",
    "no_mmap_bin_files": "not used",
    "no_persist_layer_norm": "--kernel-backend selects kernels",
    "no_query_key_layer_scaling": "scores are never scaled by the layer number",
    "no_rope_fusion": "--kernel-backend selects kernels",
    "no_save_rng": "no generator states are kept",
    "override_opt_param_scheduler": "the learning rate always follows the flags of the run",
    "use_cpu_initialization": "weights depend on seed and name, not on the device",
    "use_flash_attn": "torch chooses the attention kernel",
    "use_mcore_models": "there is one implementation of the model",
    "use_persistent_ckpt_worker": "checkpoints are written before the next step",
}
"""Switches that are accepted without effect, with the reason."""

VALUES_WITHOUT_EFFECT: dict[str, str] = {
    "DDP_impl": "there is one data parallel wrapper",
    "dist_ckpt_strictness": "checkpoints are always read strictly",
    "empty_unused_memory_level": "torch's allocator is not changed",
    "local_rank": "taken from the environment",
    "logging_level": "not used",
    "manual_gc_interval": "Python's garbage collector is not changed",
    "tensorboard_log_interval": "every step is logged",
    "tensorboard_queue_size": "not used",
    "timing_log_level": "not used",
    "timing_log_option": "not used",
    "transformer_impl": "there is one implementation",
}
"""Flags with a value, any of which is accepted without effect, with the reason."""

ONLY_VALUE: dict[str, str] = {
    "ckpt_format": "torch_dist",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32",
    "optimizer": "adam",
    "recompute_modules": "core_attn",
    "rerun_mode": "disabled",
    "softmax_type": "vanilla",
    "vocab_extra_ids": "0",
    "weight_decay_incr_style": "constant",
}
"""Flags with the only value that is supported, which is what this project always does."""

NOT_SUPPORTED: frozenset[str] = _names(
    """
    activation_func_clamp_value adlr_autoresume apply_layernorm_1p apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm attention_output_gate chat_template check_for_large_grads
    check_for_spiky_loss ckpt_convert_format ckpt_convert_save
    cpu_offloading_num_layers cuda_graph_impl cuda_graph_modules data_parallel_random_init
    dataloader_inter_document_masking ddp_average_in_collective
    ddp_num_buckets decoupled_lr decoupled_min_lr decrease_batch_size_if_needed
    defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode distribute_saved_activations
    embedding_init_method_std end_weight_decay
    error_injection_rate eval_global_batch_size eval_micro_batch_size exit_signal_handler
    external_cuda_graph fake_process_group fine_grained_activation_offloading
    first_last_layers_bf16 fp16_lm_cross_entropy fp32_residual_connection full_validation glu_linear_offset
    grad_reduce_in_bf16 heterogeneous_layers_config_path
    hybrid_layer_pattern init_method_xavier_uniform is_hybrid_model iterations_to_skip kv_lora_rank
    log_energy log_max_attention_logit log_straggler lr_decay_samples lr_warmup_samples memory_snapshot_path
    microbatch_group_size_per_virtual_pipeline_stage
    moe_apply_probs_on_input moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_extended_tp
    moe_flex_dispatcher_backend moe_hybridep_num_sms moe_latent_size moe_layer_recompute
    moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_upcycling_granularity
    moe_use_legacy_grouped_gemm moe_use_upcycling mscale mscale_all_dim
    mtp_loss_scaling_factor mtp_num_layers multi_latent_attention multiple_validation_sets
    nccl_communicator_config_path no_pad_vocab_size no_rope_freq non_persistent_ckpt_type
    non_persistent_save_interval object_storage_cache_path offload_modules optimizer_cpu_offload
    optimizer_offload_fraction overlap_moe_expert_parallel_comm overlap_p2p_communication_warmup_flush
    padded_vocab_size per_dataset_sequences_path phase_transition_iterations
    pipeline_model_parallel_split_rank pretrained_checkpoint profile
    profile_ranks profile_step_end profile_step_start q_lora_rank qk_clip qk_clip_alpha qk_clip_threshold
    qk_head_dim qk_l2_norm qk_pos_emb_head_dim quick_geglu record_memory_history
    relative_attention_max_distance relative_attention_num_buckets replication
    rope_scaling_factor rotary_scaling_factor
    rotary_seq_len_interpolation_factor save_retain_interval sft sgd_momentum spec
    start_eval_at_iter start_weight_decay step_batch_size_schedule test_mode
    tokenizer_metadata tp_comm_overlap_cfg trust_remote_code
    use_checkpoint_opt_param_scheduler use_megatron_fsdp use_mp_args_from_checkpoint_args use_mup
    use_nccl_ub use_precision_aware_optimizer use_pytorch_profiler use_rope_scaling use_torch_fsdp2
    v_head_dim verify_integrity
    """
)
"""Flags that change what is computed, saved or reported, and are not supported yet."""

NOT_SUPPORTED_FAMILIES: tuple[str, ...] = (
    "enable_ft_",
    "fp4_",
    "fp8_",
    "inprocess_",
    "lion_",
    "megatron_fsdp_",
    "muon_",
    "mup_",
    "soap_",
    "wandb_",
    "yarn_",
)
"""Prefixes of further flags that are not supported yet."""


def is_unsupported(name: str) -> bool:
    """Whether this is a flag of Megatron-LM that is not supported here."""
    return name in NOT_SUPPORTED or name.startswith(NOT_SUPPORTED_FAMILIES)
