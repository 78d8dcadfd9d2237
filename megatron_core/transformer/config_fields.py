"""For Megatron Core's users: fields of ``TransformerConfig`` that the models of this package do not read.

Names and defaults are Megatron Core's.
"""


def _named(default: object, names: str) -> dict[str, object]:
    return dict.fromkeys(names.split(), default)


WITHOUT_EFFECT: dict[str, object] = {
    **_named(
        None,
        """
        pipeline_model_parallel_comm_backend microbatch_group_size_per_vp_stage
        """,
    ),
    **_named(
        False,
        """
        deterministic_mode gradient_accumulation_fusion use_te_rng_tracker
        tp_comm_overlap_rs_dgrad tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_overlap_disable_qkv
        tp_comm_overlap_disable_fc1 overlap_p2p_comm deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush
        test_mode init_model_with_meta_device disable_bf16_reduced_precision_matmul bias_activation_fusion
        masked_softmax_fusion persist_layer_norm memory_efficient_layer_norm bias_dropout_fusion
        apply_rope_fusion use_fused_weighted_squared_relu fused_single_qkv_rope fused_residual_rmsnorm
        use_transformer_engine_op_fuser distribute_saved_activations high_priority_a2a_comm_stream
        moe_shared_expert_overlap moe_grouped_gemm moe_per_layer_logging moe_permute_fusion moe_router_fusion
        disable_parameter_transpose_cache flash_decode use_te_activation_func inference_rng_tracker
        """,
    ),
    **_named(
        True,
        """
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_split_ag
        tp_comm_split_rs batch_p2p_comm batch_p2p_sync barrier_with_L1_time attention_softmax_in_fp32
        cuda_graph_use_single_mempool clone_scatter_output_in_embedding
        """,
    ),
    "tp_comm_bootstrap_backend": "nccl",
    "cuda_graph_warmup_steps": 3,
    "config_logger_dir": "",
    "transformer_impl": "transformer_engine",
}
"""Which kernels and buffers Megatron uses; accepted with any value."""

NOT_SUPPORTED: dict[str, object] = {
    **_named(
        None,
        """
        tensor_parallel_num_weight_shards max_seqlen_per_dp_cp_rank expert_tensor_parallel_num_weight_shards
        moe_grad_scale_func mtp_grad_scale_func autocast_dtype
        num_microbatches_with_partial_activation_checkpoints mtp_hybrid_override_pattern flash_attention_version
        activation_func_clamp_value no_rope_freq experimental_attention_variant
        experimental_attention_variant_loss_scale_func dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk
        dsa_indexer_loss_coeff dsa_indexer_k_norm_epsilon linear_attention_freq fp8
        fp8_quantizer_factory fp4 fp4_quantizer_factory
        moe_shared_expert_glu_interleave_size moe_router_topk_limited_devices moe_router_force_biased
        moe_latent_size gtp_remat_opt_in_modules moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_mlp_glu_interleave_size moe_expert_rank_capacity_factor inference_cuda_graph_scope cuda_graph_scope
        mhc_recompute_layer_num symmetric_ar_type mrope_section mamba_num_heads mamba_training_ssm_states_dtype
        quant_recipe offload_modules fine_grained_offloading_max_inflight_offloads
        """,
    ),
    "gtp_weight_remat_size": 1,
    "expert_gtp_weight_remat_size": 1,
    "dsa_indexer_topk_freq": 1,
    "fp8_interval": 1,
    "fp8_amax_history_len": 1,
    "num_layers_at_start_in_bf16": 1,
    "num_layers_at_end_in_bf16": 1,
    "mlp_chunks_for_prefill": 1,
    "mlp_chunks_for_training": 1,
    **_named(
        False,
        """
        hybrid_context_parallel enable_autocast overlap_moe_expert_parallel_comm delay_wgrad_compute
        overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release use_ring_exchange_p2p
        defer_embedding_wgrad_compute mtp_standalone cpu_offloading_weights cpu_offloading_double_buffering
        cpu_offloading_retain_pinned_cpu_buffers mtp_use_repeated_layer mtp_detach_heads mtp_hsm
        fp32_residual_connection apply_residual_connection_post_layernorm activation_func_fp8_input_store
        qk_l2_norm qk_clip log_max_attention_logit attention_output_gate dsa_indexer_use_sparse_loss
        dsa_indexer_rope_interleaved dsa_indexer_k_norm_fp32 fp8_param fp8_output_proj
        fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16 use_kitchen
        use_kitchen_attention fp4_param use_grouped_gemm_for_shared_expert
        moe_router_padding_for_quantization moe_router_padding_for_fp8 use_grouped_gemm_for_dense_mlp
        moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias moe_token_dropping
        moe_enable_deepep moe_permute_fusion_into_hybridep moe_hybridep_pad_uneven_dispatch_inputs
        moe_pad_experts_for_cuda_graph_inference moe_layer_recompute moe_apply_probs_on_input
        moe_ncclep_zero_copy enable_cuda_graph cuda_graph_retain_backward_graph external_cuda_graph
        enable_mhc_connections batch_invariant_mode nccl_all_reduce_for_prefill use_inference_optimized_layers
        inference_fuse_tp_communication inference_disable_triton_nvls_kernels
        inference_moe_disable_fused_quant_kernels is_hybrid_model gdp_cutedsl_kernel heterogeneous_block_specs
        hetereogenous_dist_checkpoint fine_grained_activation_offloading delay_offload_until_cuda_graph
        moe_paged_stash
        """,
    ),
    "wgrad_deferral_limit": 0,
    "dsa_indexer_skip_topk_offset": 0,
    "fp8_margin": 0,
    "delta_offload_bytes_across_pp_ranks": 0,
    **_named(
        True,
        """
        cpu_offloading_activations dsa_indexer_rotate_activation dsa_indexer_scoring_relu fp8_wgrad
        use_mamba_mem_eff_path
        """,
    ),
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "moe_router_quantile_balancing_ema": 0.0,
    "moe_paged_stash_buffer_size_factor_cpu": 0.0,
    "qk_clip_alpha": 0.5,
    "qk_clip_threshold": 100,
    "dsa_kernel_backend": "none",
    "cuda_graph_impl": "none",
    "linear_conv_kernel_dim": 4,
    "mhc_num_residual_streams": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_state_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "activation_offload_fraction": 1.0,
    "fp8_recipe": "delayed",
    "fp8_amax_compute_algo": "most_recent",
    "kitchen_attention_backend": "sdpa",
    "fp4_recipe": "nvfp4",
    "moe_flex_dispatcher_backend": "deepep",
    "moe_hybridep_num_sms_preprocessing": 108,
    "moe_dispatch_fwd_dtype": "bf16",
    "moe_combine_bwd_dtype": "bf16",
    "cuda_graph_modules": "full",
    "mhc_sinkhorn_iterations": 20,
    "mhc_init_gating_factor": 0.01,
    "batch_invariant_backend": "te_native",
    "inference_sampling_seed": 42,
    "inference_grouped_gemm_backend": "vllm",
    "inference_moe_token_dispatcher_type": "nvls",
    "mamba_head_dim": 64,
    "moe_paged_stash_page_size": 64,
    "mamba_num_groups": 8,
    "gdp_num_householder": 3,
    "gdp_num_chunk_states_to_recompute": 2,
    "min_offloaded_tensor_size": 1024 * 1024,
    "moe_paged_stash_buffer_size_factor_cuda": 1.1,
}
"""What a model is or does; any other value than the default is an error when a model is built."""
