"""Flags of Megatron-LM that change nothing here, with the reason (see ``megatron_flags``)."""

from __future__ import annotations

ACCEPTED: dict[str, str] = {
    "--kernel-backend selects kernels": """
        disable_jit_fuser no_bias_dropout_fusion no_bias_gelu_fusion no_bias_swiglu_fusion fused_residual_rmsnorm
        no_gradient_accumulation_fusion no_masked_softmax_fusion no_persist_layer_norm no_rope_fusion
        use_fused_weighted_squared_relu use_te_activation_func use_transformer_engine_op_fuser mla_down_proj_fusion""",
    "main gradients are float32": "accumulate_allreduce_grads_in_fp32 ddp_reduce_scatter_with_fp32_accumulation "
    "ddp_param_name_patterns_for_fp32_local_accumulation=",
    "softmax is computed in float32": "attention_softmax_in_fp32",
    "there is one implementation of the model": """
        export_default_te_spec export_force_local_attention export_te_mcore_model transformer_impl= use_mcore_models
        enable_experimental export_model_type=""",
    "--async-save has one way to write, a thread": """
        async_strategy= async_ckpt_cpu_priority= async_ckpt_io_priority= async_ckpt_use_cpu_shm
        use_persistent_ckpt_worker""",
    "checkpoints have one format, which every layout reads": """
        auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_format= dist_ckpt_format= use_dist_ckpt
        dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient
        ckpt_drop_redundant_extra_state ckpt_pg_tensors_cache_path= ckpt_pg_tensors_cache_create
        dist_ckpt_save_pre_mcore_014 dist_ckpt_workers= ckpt_convert_update_legacy_dist_opt_format
        no_strict_fsdp_dtensor_load disable_strict_fsdp_dtensor_load""",
    "every rank reads what it needs and writes what it owns": """
        ckpt_fully_parallel_load ckpt_fully_parallel_save no_ckpt_fully_parallel_save
        ckpt_fully_parallel_load_exchange_algo= ckpt_fully_parallel_load_per_rank_objects
        ckpt_fully_parallel_save_process_group= ckpt_fully_parallel_load_process_group=""",
    "checkpoints are always read strictly and checked": """
        dist_ckpt_strictness= verify_integrity no_ckpt_load_validate_sharding_integrity
        disable_ckpt_load_validate_sharding_integrity""",
    "no generator states are kept": "no_load_rng no_save_rng",
    "the tokenizer's files are always kept in checkpoints": """
        no_save_tokenizer_assets disable_save_tokenizer_assets no_use_tokenizer_model_from_checkpoint_args
        disable_use_tokenizer_model_from_checkpoint_args""",
    "weights, data order and dropout depend on seed, names and positions, not on generators": """
        use_cpu_initialization init_model_with_meta_device no_initialization te_rng_tracker inference_rng_tracker
        data_parallel_random_init""",
    "the loss is always the mean over the tokens of the global batch": """
        calculate_per_token_loss ddp_average_in_collective no_gradient_reduce_div_fusion""",
    "8-bit copies of weights are made where they are used, and scales are brought up to date after every step": """
        keep_fp8_transpose_cache fp8_interval=""",
    "always logged": """
        log_memory_to_tensorboard log_progress log_throughput log_timers_to_tensorboard
        log_validation_ppl_to_tensorboard""",
    "not logged": """
        log_world_size_to_tensorboard log_device_memory_used log_memory_interval= log_energy
        straggler_ctrlr_port=
        disable_straggler_on_startup no_log_loss_scale_to_tensorboard
        disable_log_loss_scale_to_tensorboard""",
    "not used": """
        logging_level= tensorboard_queue_size= no_barrier_with_level_1_timing
        no_mmap_bin_files nvtx_ranges config_logger_dir= enable_gpt_oss modelopt_enabled test_mode""",
    "every step is logged": "tensorboard_log_interval=",
    "a service of NVIDIA's clusters that is not contacted": """
        adlr_autoresume adlr_autoresume_interval= no_one_logger one_logger_project= one_logger_run_name=
        one_logger_async app_tag_run_name= app_tag_run_version= enable_ft_package calc_ft_timeouts
        ft_num_warmup_iters= run_workload_inspector_server otel_enabled otel_service_name= otel_span_groups=
        gpu_sniff_test_interval=""",
    "--max-bad-steps says what a loss or norm that is not finite does, --spike-factor what a spike is": """
        rerun_mode= result_rejected_tracker_filename= check_for_large_grads check_for_spiky_loss""",
    "the process group's restart is torchrun's": """
        inprocess_restart inprocess_max_iterations= inprocess_monitor_thread_interval=
        inprocess_monitor_process_interval= inprocess_progress_watchdog_interval= inprocess_heartbeat_interval=
        inprocess_soft_timeout= inprocess_hard_timeout= inprocess_heartbeat_timeout= inprocess_barrier_timeout=
        inprocess_completion_timeout= inprocess_last_call_wait= inprocess_termination_grace_time=
        inprocess_granularity= inprocess_active_world_size= inprocess_empty_cuda_cache""",
    "SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C always save a checkpoint and end the run": """
        exit_signal_handler exit_signal= exit_signal_handler_for_dataloader exit_signal_handler_for_training""",
    "Python's garbage collector is not changed": """
        manual_gc manual_gc_interval= no_manual_gc_eval disable_manual_gc_eval""",
    "kernels are started one by one: CUDA graphs change speed, not results": """
        cuda_graph_impl= enable_cuda_graph external_cuda_graph optimizer_cuda_graph cuda_graph_warmup_steps=
        cuda_graph_modules= cuda_graph_scope=""",
    "activations stay on the device: see --cpu-offloading-num-layers and --recompute-modules to save memory": """
        fine_grained_activation_offloading offload_modules= min_offloaded_tensor_size= delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks= activation_offload_fraction=
        fine_grained_offloading_max_inflight_offloads=""",
    "torch's allocator is not changed": "empty_unused_memory_level=",
    "taken from the environment": "local_rank=",
    "there is one order of initialisation": "lazy_mpu_init",
    "groups are made as they are needed": """
        disable_gloo_process_groups create_all_gather_group use_ring_exchange_p2p high_priority_stream_groups=
        pipeline_model_parallel_comm_backend= distributed_timeout_seconds_after_init=""",
    "tuning of NCCL by its own environment variables": """
        nccl_communicator_config_path= use_nccl_ub disable_symmetric_registration use_sharp sharp_enabled_group=
        symmetric_ar_type= gtp_remat_nccl_ub gtp_expert_remat_nccl_ub ddp_pad_buckets_for_high_nccl_busbw
        flight_recorder_dump_path= flight_recorder_trace_buffer_size= no_flight_recorder_dump_on_timeout
        disable_flight_recorder_dump_on_timeout flight_recorder_include_stack_trace
        no_flight_recorder_include_only_active disable_flight_recorder_include_only_active
        no_flight_recorder_extra_dump_on_exec disable_flight_recorder_extra_dump_on_exec""",
    "how tensor-parallel communication is overlapped does not change results, and is not tuned": """
        tp_comm_overlap_cfg= tp_comm_bootstrap_backend= tp_comm_overlap_rs_dgrad no_tp_comm_bulk_wgrad
        disable_tp_comm_bulk_wgrad no_tp_comm_bulk_dgrad disable_tp_comm_bulk_dgrad no_tp_comm_overlap_ag
        disable_tp_comm_overlap_ag no_tp_comm_overlap_rs disable_tp_comm_overlap_rs no_tp_comm_split_ag
        disable_tp_comm_split_ag no_tp_comm_split_rs disable_tp_comm_split_rs no_clone_scatter_output_in_embedding
        disable_clone_scatter_output_in_embedding""",
    "how the pipeline's work is ordered does not change results; see --pipeline-schedule": """
        microbatch_group_size_per_virtual_pipeline_stage= overlap_p2p_communication_warmup_flush
        defer_embedding_wgrad_compute wgrad_deferral_limit= delay_wgrad_compute train_sync_interval=
        overlap_param_gather_with_optimizer_step no_align_grad_reduce disable_align_grad_reduce
        no_align_param_gather""",
    "there is one data-parallel wrapper, which lays out its buckets itself; see --ddp-bucket-size": """
        DDP_impl= ddp_num_buckets= suggested_communication_unit_size= no_use_layer_wise_param_layout""",
    "ZeRO shards by units with buffers of its own; see --zero-stage": """
        megatron_fsdp_version= outer_dp_sharding_strategy= fsdp_double_buffer fsdp_manual_registration
        enable_full_sharding_in_hsdp megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        fsdp_db_use_persist_buf_on_alloc_fail""",
    "torch selects the attention kernel": "use_flash_attn flash_attention_version=",
    "padding rows take no part in the softmax and are never saved": """
        padded_vocab_size= no_pad_vocab_size disable_pad_vocab_size""",
    "masks are never made by the loader": "no_create_attention_mask_in_dataloader allow_ambiguous_pad_tokens",
    "the default order of samples has no index files": """
        dataloader_fast_cache_load dataloader_defer_npy_index_mmap per_dataset_sequences_path=""",
    "offloaded state is in pinned memory, and its copies overlap": """
        use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d no_pin_cpu_grads no_pin_cpu_params
        cpu_offloading_retain_pinned_cpu_buffers""",
    "Muon makes whole matrices orthogonal in the precision of main weights": """
        muon_no_split_qkv muon_nesterov muon_fp32_matmul_prec= muon_use_syrk""",
    "weights with one dimension have no weight decay, and there is no such exception": "no_weight_decay_cond_type=",
    "scores are scaled by the layer's number only with --apply-query-key-layer-scaling": "no_query_key_layer_scaling",
    "the load of each layer's experts is always logged": "moe_per_layer_logging",
    "how tokens are sorted and sent to experts does not change results; see --moe-token-dispatcher-type": """
        moe_grouped_gemm moe_permute_fusion moe_router_fusion use_grouped_gemm_for_shared_expert
        moe_use_grouped_tensor moe_single_grouped_weight moe_single_grouped_bias moe_router_padding_for_quantization
        moe_router_padding_for_fp8 moe_enable_deepep moe_flex_dispatcher_backend= moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_pad_experts_for_cuda_graph_inference moe_flex_dispatcher_num_sms=
        moe_deepep_num_sms= moe_hybridep_num_sms= moe_hybridep_num_blocks_permute= moe_hybridep_num_blocks_unpermute=
        moe_hybridep_num_sms_preprocessing= moe_ncclep_zero_copy overlap_moe_expert_parallel_comm
        overlap_dispatch_backward_with_experts_wgrad ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream
        moe_paged_stash moe_paged_stash_page_size= moe_paged_stash_buffer_size_factor_cuda=
        moe_paged_stash_buffer_size_factor_cpu= moe_extended_tp moe_use_legacy_grouped_gemm""",
    "for models that are not GPTs": """
        bert_no_binary_head mask_prob= short_seq_prob= sample_rate= decoder_num_layers= decoder_seq_length=
        onnx_safe= output_bert_embeddings bert_embedder_type= ict_head_size= biencoder_projection_dim=
        biencoder_shared_query_context_model ict_load= bert_load= titles_data_path= query_in_block_prob=
        use_one_sent_docs evidence_data_path= retriever_report_topk_accuracies= retriever_score_scaling
        block_data_path= embedding_path= indexer_batch_size= indexer_log_interval= num_classes= img_h= img_w=
        num_channels= patch_dim= classes_fraction= data_per_class_fraction= no_data_sharding head_lr_mult=
        vision_pretraining_type= vision_backbone_type= swin_backbone_type= mask_type= mask_factor= iter_per_epoch=
        dino_local_img_size= dino_local_crops_number= dino_head_hidden_size= dino_bottleneck_size=
        dino_freeze_last_layer= dino_norm_last_layer dino_warmup_teacher_temp= dino_teacher_temp=
        dino_warmup_teacher_temp_epochs= mrope_section=""",
    "for inference, which has its own settings": """
        inference_batch_times_seqlen_threshold= max_tokens_to_oom= use_legacy_static_engine inference_max_requests=
        inference_max_seq_length= inference_dynamic_batching inference_dynamic_batching_buffer_size_gb=
        inference_dynamic_batching_paused_buffer_size_gb= inference_dynamic_batching_mamba_memory_ratio=
        inference_dynamic_batching_block_size= inference_dynamic_batching_max_requests=
        inference_dynamic_batching_max_tokens= inference_dynamic_batching_num_cuda_graphs=
        inference_dynamic_batching_track_paused_request_events
        inference_dynamic_batching_track_generated_token_events decode_only_cuda_graphs
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens=
        inference_dynamic_batching_unified_memory_level= enable_chunked_prefill num_speculative_tokens=
        inference_dynamic_batching_prefix_caching no_inference_dynamic_batching_prefix_caching
        inference_dynamic_batching_prefix_caching_eviction_policy=
        inference_dynamic_batching_prefix_caching_coordinator_policy=
        inference_dynamic_batching_prefix_caching_routing_alpha= inference_dynamic_batching_prefix_caching_mamba_gb=
        inference_dynamic_batching_cuda_graph_mixed_prefill_count=
        inference_dynamic_batching_cuda_graph_sizing_distribution= inference_dynamic_batching_sampling_backend=
        use_same_sampling_seed_across_dp_ranks inference_dynamic_batching_async_sched_mode=
        inference_dynamic_batching_logprobs_mode= inference_logging_step_interval= inference_text_gen_server_logging
        no_inference_text_gen_server_logging inference_wandb_logging no_inference_wandb_logging
        inference_coordinator_port= mamba_inference_conv_states_dtype= mamba_inference_ssm_states_dtype=
        inference_use_synchronous_zmq_collectives no_inference_use_synchronous_zmq_collectives
        inference_disable_ep_consensus no_inference_disable_ep_consensus inference_shards=
        inference_cuda_graph_scope= flash_decode nccl_all_reduce_for_prefill inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend=
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type= mlp_chunks_for_prefill=
        cache_mla_latents""",
    "megatron's file systems (multi-storage client) are not used": "enable_msc disable_msc",
}
"""Reason -> flags that change nothing that is computed or saved, whatever their value."""

DEPENDENT: dict[str, str] = {
    "enable_mhc_connections": """
        mhc_num_residual_streams= mhc_sinkhorn_iterations= mhc_init_gating_factor= mhc_recompute_layer_num=""",
    "error_injection_rate": "error_injection_type=",
    "experimental_attention_variant": """
        dsa_indexer_n_heads= dsa_indexer_head_dim= dsa_indexer_topk= dsa_indexer_topk_freq=
        dsa_indexer_skip_topk_offset= dsa_indexer_loss_coeff= dsa_indexer_use_sparse_loss dsa_kernel_backend=
        dsa_indexer_rope_interleaved no_dsa_indexer_rotate_activation disable_dsa_indexer_rotate_activation
        no_dsa_indexer_scoring_relu disable_dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon=
        dsa_indexer_k_norm_fp32 linear_conv_kernel_dim= linear_key_head_dim= linear_value_head_dim=
        linear_num_key_heads= linear_num_value_heads= linear_attention_freq=""",
    "fault_injector_fault_types": """
        fault_injector_ranks= fault_injector_num_ranks= fault_injector_fault_probabilities=
        fault_injector_fault_delay= fault_injector_delay_start_iteration= fault_injector_mtti_seconds=
        fault_injector_offset_seconds= fault_injector_seed=""",
    "fp4_format": "fp4_recipe= fp4_quantizer_factory= fp4_param_gather",
    "fp8_format": "fp8_quantizer_factory= fp8_output_proj reuse_grad_buf_for_mxfp8_param_ag",
    "is_hybrid_model": """
        mamba_state_dim= mamba_head_dim= mamba_num_groups= mamba_num_heads= gdp_num_householder=
        disable_mamba_mem_eff_path gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute=
        mamba_training_ssm_states_dtype= mtp_hybrid_override_pattern=""",
    "batch_invariant_mode": "batch_invariant_backend=",
    "logits_load_dir": """
        logits_load_decode_threads= logits_load_prefetch_factor= logits_load_msc_prefetch_depth=
        logits_load_kd_loss_alpha= logits_load_ignore_errors""",
    "logits_save_dir": "logits_save_top_k= logits_save_top_p= logits_save_top_p_min_k= logits_save_dtype=",
    "moe_routing_trace_path": """
        moe_routing_trace_max_training_iters= moe_routing_trace_capture_logits moe_routing_trace_capture_hidden_states
        moe_routing_trace_dump_weights""",
    "moe_use_upcycling": "moe_upcycling_granularity=",
    "mtp_num_layers": "mtp_standalone mtp_use_repeated_layer mtp_detach_heads mtp_hsm",
    "multiple_validation_sets": "validation_set_names=",
    "non_persistent_ckpt_type": "non_persistent_local_ckpt_dir= non_persistent_local_ckpt_algo=",
    "perform_rl_step": """
        rl_prompts_per_eval= grpo_prompts_per_step= grpo_group_size= rl_generation_lag= rl_max_inflight_requests=
        rl_submission_granularity= rl_consumption_granularity= rl_durable_rollout_bank rl_rollout_bank_dir=
        rl_rollout_bank_max_bytes= grpo_iterations= grpo_clamp_eps_lower= grpo_clamp_eps_upper= grpo_kl_beta=
        grpo_entropy_term_weight= grpo_filter_groups_with_same_reward langrl_env_config= rl_default_temperature=
        rl_default_top_p= rl_default_top_k= rl_offload_optimizer_during_inference rl_kv_cache_management_mode=
        rl_persist_cuda_graphs no_rl_persist_cuda_graphs rl_partial_rollouts no_rl_partial_rollouts
        rl_inference_logprobs_is_correction no_rl_inference_logprobs_is_correction
        rl_importance_sampling_truncation_coef= rl_use_sequence_packing no_rl_use_sequence_packing
        rl_sequence_packing_max_sequences_per_bin= rl_sequence_packing_algo= rl_training_cuda_graphs
        no_rl_training_cuda_graphs rl_inference_tensor_model_parallel_size=
        rl_inference_pipeline_model_parallel_size= rl_inference_expert_model_parallel_size=
        rl_inference_expert_tensor_model_parallel_size= rl_inference_model_unified_memory_level=
        rl_offload_inference_model_weights_when_idle no_rl_offload_inference_model_weights_when_idle refit_method=
        rl_verify_model_weights_swap no_rl_verify_model_weights_swap rl_skip_bos_token no_rl_skip_bos_token
        rl_profile rl_profile_dir= rl_inference_parsers=""",
    "profile": "pytorch_profiler_collect_chakra record_shapes",
    "qk_clip": "qk_clip_alpha= qk_clip_threshold=",
    "record_memory_history": "memory_snapshot_path=",
    "replication": "replication_jump= replication_factor=",
    "use_kitchen_attention": "kitchen_attention_backend=",
    "use_mup": """
        mup_width_mult= mup_base_hidden_size= mup_embedding_mult= mup_output_mult= mup_base_head_dim=
        mup_attn_scale_power=""",
    "position_embedding_type": """
        relative_attention_num_buckets= relative_attention_max_distance=""",
    "tensor_parallel_num_weight_shards": """
        expert_tensor_parallel_num_weight_shards= gtp_remat_opt_in_modules=
        gtp_remat_reduce_scatter_with_fp32_accumulation""",
    "export_kd_teacher_load": "export_kd_cfg= export_kd_teacher_model_config= export_kd_teacher_ckpt_format=",
}
"""Flag -> the flags that change nothing without it (or with its default value)."""
