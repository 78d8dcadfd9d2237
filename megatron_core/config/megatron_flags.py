"""What becomes of the other flags that a launch script for Megatron-LM may contain.

Flags that are fields of ``RunConfig`` have Megatron-LM's meaning and are not listed. Names are written with underscores
and without the leading hyphens; ``name=`` takes values, ``name`` is a switch. Each table maps what is said about flags
to their names, so that one reason is written once. ``docs/from_megatron.md`` shows all of it as a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_core.config.flags_without_effect import ACCEPTED, DEPENDENT

SAME_AS: dict[str, tuple[str, ...]] = {
    "checkpoint_activations": (
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    "disable_fp8_wgrad": ("--no-fp8-wgrad",),
    "no_async_tensor_model_parallel_allreduce": ("--no-tp-comm-overlap",),
    "torch_fsdp2_no_reshard_after_forward": ("--zero3-keep-after-forward",),
    "recompute_activations": ("--recompute-granularity", "selective"),
    "use_rotary_position_embeddings": ("--position-embedding-type", "rope"),
    "use_tp_pp_dp_mapping": ("--rank-order", "tp-cp-ep-pp-dp"),
}
"""Switches that are equivalent to flags of this project."""

RENAMED: dict[str, str] = {
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "check_weight_hash_across_dp_replicas_interval": "replica_check_interval",
    "encoder_num_layers": "num_layers",
    "encoder_seq_length": "seq_length",
    "keep_every": "save_retain_interval",
    "model_parallel_size": "tensor_model_parallel_size",
    "persistent_save_interval": "save_interval",
    "rotary_scaling_factor": "rope_scaling_factor",
    "warmup": "lr_warmup_fraction",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
}
"""Flags with a value that have another name here."""

OVERRIDDEN_BY_FLAG: dict[str, tuple[str, ...]] = {
    "use_megatron_fsdp": ("--data-parallel-sharding-strategy", "optim_grads_params"),
    "use_torch_fsdp2": ("--data-parallel-sharding-strategy", "optim_grads_params"),
    # Scripts for Llama pass it together with rotary positions, where it must not change anything.
    "no_position_embedding": ("--position-embedding-type", "none"),
    # There the factor is 1 until --rotary-scaling-factor says otherwise.
    "position_embedding_type=yarn": ("--rope-scaling-factor", "1.0"),
    # Its rotary positions are YaRN's, unless --rope-type says otherwise.
    "multi_latent_attention": (
        *("--use-rope-scaling", "--rope-scaling-type", "yarn", "--rope-scaling-factor", "1.0"),
        *("--original-max-position-embeddings", "4096"),
    ),
    "rope_type=yarn": ("--rope-scaling-factor", "1.0"),
    # The old name said nothing of granularity and of the number of layers, which was 1.
    "activations_checkpoint_method": ("--recompute-granularity", "full", "--recompute-num-layers", "1"),
}
"""Flags that an explicit flag overrides, also one that comes earlier; for a switch all of its meaning."""

VALUE_MEANS: dict[tuple[str, str], tuple[str, ...]] = {
    ("position_embedding_type", "yarn"): (
        *("--position-embedding-type", "rope", "--use-rope-scaling", "--rope-scaling-type", "yarn"),
    ),
    ("rope_type", "rope"): ("--no-use-rope-scaling", "--rope-scaling-type", "llama3"),
    ("rope_type", "yarn"): ("--use-rope-scaling", "--rope-scaling-type", "yarn"),
}
"""Flag and value that are equivalent to flags of this project."""

SAME_VALUE: dict[str, dict[str, str]] = {
    # torch's scaled_dot_product_attention selects its kernel, the flash one if possible.
    "attention_backend": {"flash": "auto", "fused": "auto", "local": "unfused"},
    # Transformer Engine's kernel computes the same.
    "cross_entropy_fusion_impl": {"te": "native"},
    # Kernels that send tokens as alltoall does.
    "moe_token_dispatcher_type": {"flex": "alltoall"},
    "tokenizer_type": {"GPTSentencePieceTokenizer": "SentencePieceTokenizer", "SFTTokenizer": "HuggingFaceTokenizer"},
}
"""Values of a shared flag that have another name here."""

LISTS: frozenset[str] = frozenset({"window_size", "window_attn_skip_freq", "moe_layer_freq"})
"""Shared flags whose values may be one Python expression of numbers, lists, + and *: ``127,0``, ``([1]*3+[0])*2``."""

ONLY_VALUE: dict[str, tuple[str, ...]] = {
    "error_injection_rate": ("0",),
    "glu_linear_offset": ("0", "0.0"),
    "main_grads_dtype": ("fp32",),
    "megatron_fsdp_grad_comm_dtype": ("fp32", "auto"),
    "megatron_fsdp_main_grads_dtype": ("fp32", "auto"),
    "megatron_fsdp_main_params_dtype": ("fp32", "auto"),
    "mlp_chunks_for_training": ("1",),
    "muon_extra_scale_factor": ("0.2",),
    "muon_scale_mode": ("spectral",),
    "moe_combine_bwd_dtype": ("bf16",),
    "non_persistent_ckpt_type": ("global",),
    "moe_dispatch_fwd_dtype": ("bf16",),
    "sft_tokenizer_prompt_format": ("default",),
    "softmax_type": ("vanilla",),
    "tensor_parallel_num_weight_shards": ("1",),
    "vocab_extra_ids": ("0",),
    "null_tokenizer_pad_id": ("-1",),
}
"""Flags with the only values that are supported, which is what this project always does."""

REFUSED: dict[str, str] = {
    "4-bit training is not supported; use --fp8-format": "fp4_format= te_precision_config_file= use_kitchen_attention",
    "this variant of experts is not supported; remove it": """
        moe_shared_expert_glu_interleave_size= moe_enable_routing_replay moe_router_quantile_balancing_ema=
        moe_router_force_biased= moe_layer_recompute moe_apply_probs_on_input moe_latent_size= moe_dispatch_fwd_dtype=
        moe_combine_bwd_dtype= moe_mlp_glu_interleave_size= moe_expert_rank_capacity_factor= moe_use_upcycling
        moe_routing_trace_path= save_tokens_per_expert_interval=""",
    "this way of context parallelism is not supported yet; remove it": """
        hybrid_context_parallel max_seqlen_per_dp_cp_rank=""",
    "give --data-phases for data that changes during training; remove it": "phase_transition_iterations=",
    "the chat template of the tokenizer is used; remove it, or give another one with --chat-template": """
        sft_tokenizer_prompt_format=""",
    "main weights and gradients are float32 (but see --use-precision-aware-optimizer); remove it": """
        megatron_fsdp_main_params_dtype= megatron_fsdp_main_grads_dtype= megatron_fsdp_grad_comm_dtype=
        main_grads_dtype=""",
    "Muon's updates have the scale of AdamW's, and AdamW for what is no hidden matrix; remove it": """
        muon_scale_mode= muon_coefficient_type= muon_tp_mode= muon_extra_scale_factor= muon_scalar_optimizer=""",
    "this variant of the layer is not supported; remove it, or write the layer yourself (docs/from_megatron.md)": """
        activation_func_clamp_value= apply_residual_connection_post_layernorm
        fp32_residual_connection glu_linear_offset= init_method_xavier_uniform qk_l2_norm qk_clip quick_geglu
        softmax_type= no_rope_freq= log_max_attention_logit experimental_attention_variant=
        enable_mhc_connections spec=
        heterogeneous_layers_config_path= heterogeneous_layers_config_encoded_json= use_mup
        use_grouped_gemm_for_dense_mlp freeze_all_layers mlp_chunks_for_training=
        distribute_saved_activations export_qk_l2_norm export_moe_apply_probs_on_input
        tensor_parallel_num_weight_shards=""",
    "models with other layers than attention are not supported; use Megatron-LM's pretrain_hybrid.py": """
        is_hybrid_model hybrid_layer_pattern= hybrid_override_pattern=""",
    "legal: rope, yarn": "rope_type=",
    "bitwise equality over batch sizes is not offered; use --deterministic-mode": "batch_invariant_mode",
    "precision of matrix products and logits follows --bf16, --fp16 or --fp64; remove it": """
        disable_bf16_reduced_precision_matmul output_logit_dtype= fp16_lm_cross_entropy""",
    "give batch sizes that divide over the data-parallel ranks; remove it": "decrease_batch_size_if_needed",
    "give --micro-batch-size and --global-batch-size": "batch_size=",
    "evaluation uses the sizes of training and one validation split; remove it": """
        eval_micro_batch_size= full_validation multiple_validation_sets
        start_eval_at_iter=""",
    "only --save-interval and --save decide what is saved; remove it": """
        save_params_interval= save_activations_interval= save_wgrads_interval= save_dgrads_interval=
        replication override_ckpt_iteration=
        dump_param_to_param_group_map= ckpt_convert_format= ckpt_convert_save=""",
    "checkpoints for a fast restart are in one folder, --non-persistent-global-ckpt-dir; take global": """
        non_persistent_ckpt_type=""",
    "checkpoints are read from --load alone; use --finetune to start at iteration 0": """
        pretrained_checkpoint= use_mp_args_from_checkpoint_args load_main_params_from_ckpt""",
    "this source of data is not supported; remove it": """
        dataloader_inter_document_masking object_storage_cache_path= finetune_data_files= finetune_data_split=
        finetune_hf_dataset=""",
    "distillation and quantisation are not supported; remove it": """
        logits_save_dir= logits_load_dir= export_kd_teacher_load= export_kv_cache_quant export_legacy_megatron
        export_offline_model export_quant_cfg= export_real_quant_cfg= freeze_base_for_mtp qad_train_target=""",
    "reinforcement learning is not supported; remove it": "perform_rl_step",
    "faults are injected with --inject-fault KIND@RANK:STEP; remove it": """
        error_injection_rate= fault_injector_fault_types=""",
    "the history of memory is recorded with torch.cuda.memory in a script of your own; remove it": """
        record_memory_history""",
    "this option of the tokenizer is not supported; remove it, or prepare the tokenizer's files accordingly": """
        tokenizer_metadata= tokenizer_special_tokens= tokenizer_sentencepiece_legacy
        no_tokenizer_sentencepiece_ignore_extra_whitespaces
        disable_tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_hf_no_use_fast
        tokenizer_hf_no_include_special_tokens null_tokenizer_eod_id= null_tokenizer_pad_id= trust_remote_code
        use_gigatoken vocab_extra_ids=""",
    "write the settings as --config FILE": "yaml_cfg=",
    "only models of text are supported; remove it": "vision_pretraining",
    "process groups cannot be imitated; --dry-run describes a rank of any world": "fake_process_group",
}
"""What is missing and the way out -> flags that change what is computed, saved or reported, and are not supported."""


@dataclass(frozen=True)
class Flag:
    """What becomes of a flag that is not a setting of this project."""

    fate: Literal["accepted", "dependent", "refused"]
    """accepted: changes nothing. dependent: changes nothing without another flag. refused: an error."""
    reason: str
    """Why it changes nothing; the flag on which it depends; or what is missing, with the way out."""
    takes_values: bool
    """Whether it is no switch."""


def _table() -> dict[str, Flag]:
    """All flags of ``ACCEPTED``, ``DEPENDENT`` and ``REFUSED`` by name."""
    tables: tuple[tuple[Literal["accepted", "dependent", "refused"], dict[str, str]], ...] = (
        ("accepted", ACCEPTED),
        ("dependent", DEPENDENT),
        ("refused", REFUSED),
    )
    return {
        word.rstrip("="): Flag(fate, reason, word.endswith("="))
        for fate, table in tables
        for reason, words in table.items()
        for word in words.split()
    }


FLAGS: dict[str, Flag] = _table()
"""Every other flag by name."""
