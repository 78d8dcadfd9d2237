"""Rules for single settings: ranges, and settings that have no effect without another one."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from megatron_core.config.model import LatentAttentionConfig, MuPConfig
from megatron_core.config.moe import MoEConfig
from megatron_core.config.run import RunConfig

RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    (
        """
        mup_base_hidden_size
        num_layers hidden_size num_attention_heads ffn_hidden_size kv_channels num_query_groups q_lora_rank
        mtp_num_layers kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim max_position_embeddings
        original_max_position_embeddings make_vocab_size_divisible_by num_experts moe_ffn_hidden_size
        moe_shared_expert_intermediate_size moe_router_topk moe_router_num_groups moe_router_group_topk
        recompute_num_layers tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
        expert_model_parallel_size expert_tensor_parallel_size decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        ddp_bucket_size powersgd_rank num_distributed_optimizer_instances micro_batch_size straggler_minmax_count
        global_batch_size eval_global_batch_size train_iters train_samples eval_interval exit_interval lr_decay_iters
        lr_wsd_decay_iters muon_num_ns_steps lr_decay_samples lr_wsd_decay_samples save_retain_interval keep_last
        non_persistent_save_interval loss_scale_window hysteresis seq_length vocab_size save_interval log_interval
        replica_check_interval num_dataset_builder_threads fp8_amax_history_len fp8_statistics_interval
        replication_jump""",
        lambda x: x >= 1,
        "1, 2, 3, ...",
    ),
    (
        """
        grad_compression_warmup_iters cpu_offloading_num_layers eval_iters seed lr_warmup_iters lr_warmup_samples
        ckpt_step num_workers tiktoken_num_special_tokens max_bad_steps max_rollbacks save_bad_steps fp8_margin
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16""",
        lambda x: x >= 0,
        "0, 1, 2, ...",
    ),
    (
        """
        mup_base_head_dim mup_embedding_mult mup_output_mult
        rotary_seq_len_interpolation_factor rope_scaling_factor yarn_beta_fast yarn_beta_slow yarn_attention_factor
        rotary_base rotary_base_of_windows softmax_scale attn_logit_softcapping final_logit_softcapping norm_epsilon
        init_method_std embedding_init_method_std distributed_timeout_minutes
        exit_duration_in_mins adam_eps peak_tflops decoupled_lr loss_scale initial_loss_scale min_loss_scale
        moe_router_topk_scaling_factor moe_router_bias_update_rate moe_expert_capacity_factor spike_factor""",
        lambda x: 0 < x < math.inf,
        "a finite number above 0",
    ),
    (
        """
        mup_attn_scale_power
        mscale mscale_all_dim min_lr lr_warmup_init weight_decay start_weight_decay end_weight_decay clip_grad
        clip_grad_value decoupled_min_lr mid_level_dataset_surplus mtp_loss_scaling_factor moe_aux_loss_coeff
        moe_z_loss_coeff""",
        lambda x: 0 <= x < math.inf,
        "0 or a finite number above it",
    ),
    (
        """
        hidden_dropout attention_dropout adam_beta1 adam_beta2 sgd_momentum lion_beta1 lion_beta2 muon_momentum
        lr_warmup_fraction moe_input_jitter_eps""",
        lambda x: 0 <= x < 1,
        "from 0 up to, not including, 1",
    ),
    ("rotary_percent optimizer_offload_fraction", lambda x: 0 < x <= 1, "above 0 and up to 1"),
    ("fim_rate fim_spm_rate fim_fragment_rate", lambda x: 0 <= x <= 1, "0 to 1"),
    # Far more than any model has: what is made one by one, or of this size, would be waited for until it fails.
    (
        "num_layers num_experts mtp_num_layers num_virtual_stages_per_pipeline_rank num_workers "
        "num_dataset_builder_threads",
        lambda x: x <= 2**16,
        "up to 65,536",
    ),
    (
        "hidden_size ffn_hidden_size moe_ffn_hidden_size num_attention_heads kv_channels seq_length vocab_size "
        "micro_batch_size make_vocab_size_divisible_by max_position_embeddings",
        lambda x: x < 2**31,
        "up to 2,147,483,647",
    ),
    ("distributed_timeout_minutes", lambda x: x <= 10**6, "up to 1,000,000"),
    ("clip_grad_value", lambda x: x <= 3e38, "up to 3e38, as float32 goes"),
)
"""Settings, what is legal, and the same in words; ``None`` is always legal, NaN never."""

NEEDS = {
    "--num-experts N": " ".join(part.name for part in fields(MoEConfig)),
    "--use-mup": " ".join(part.name for part in fields(MuPConfig)),
    "--multi-latent-attention": " ".join(part.name for part in fields(LatentAttentionConfig)),
    "--group-query-attention": "num_query_groups",
    "--qk-layernorm": "apply_wd_to_qk_layernorm",
    "--window-size BEFORE 0": "window_attn_skip_freq",
    "--use-rope-scaling": "rope_scaling_type",
    "--mtp-num-layers N": "mtp_loss_scaling_factor",
    "--cross-entropy-loss-fusion": "cross_entropy_fusion_impl",
    "--moe-shared-expert-intermediate-size N": "moe_shared_expert_gate",
    "--moe-router-enable-expert-bias": "moe_router_bias_update_rate",
    "--moe-expert-capacity-factor X": "moe_pad_expert_input_to_capacity moe_token_drop_policy",
    "--fp8-format hybrid": "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad "
    "fp8_param_gather first_last_layers_bf16 fp8_statistics_interval",
    "--first-last-layers-bf16": "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16",
    "--fp16": "loss_scale",
    "--decoupled-lr X": "decoupled_min_lr",
    "--max-bad-steps N": "spike_factor",
    "--sft": "chat_template",
    "--fim-data": "fim_split_sample fim_fragment_rate fim_no_prefix fim_eod_token",
    "--fim-fragment-rate X": "fim_split_sample",
    "--fim-split-sample TOKEN": "fim_fragment_rate",
    "--save FOLDER": "save_retain_interval keep_last overwrite_checkpoints async_save non_persistent_save_interval",
    "--load FOLDER": "ckpt_step use_checkpoint_args finetune changed_model_settings",
    "--non-persistent-save-interval N": "non_persistent_global_ckpt_dir non_persistent_ckpt_type",
    "--replication": "replication_jump replication_factor",
}
"""A flag -> the settings that have no effect without it."""


def range_problems(config: RunConfig) -> Iterator[str]:
    """Settings whose value is out of range, independent of other settings."""
    values = config.flat()
    for names, is_legal, legal in RANGES:
        yield from _outside(values, names, is_legal, legal)
    for name, value in values.items():
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and not _is_encodable(text):
                yield f"{name}={text!r} has a character that no file's name and no flag can have; remove it"
    if config.training.skip_train:
        yield from _outside(values, "lr", lambda x: 0 <= x < math.inf, "0 or a finite number above it")
    else:
        yield from _outside(values, "lr", lambda x: 0 < x < math.inf, "a finite number above 0 (0 with --skip-train)")


def _is_encodable(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a surrogate pair, from a JSON or YAML file
        return False


def _outside(values: dict[str, Any], names: str, is_legal: Callable[[float], bool], legal: str) -> Iterator[str]:
    for name in names.split():
        if values[name] is not None and not is_legal(values[name]):
            yield f"{name}={values[name]} is out of range; legal: {legal}"


def unused_problems(config: RunConfig) -> Iterator[str]:
    """Settings that differ from their defaults and have no effect, each once."""
    values, defaults, reported = config.flat(), RunConfig().flat(), set[str]()
    for flag, names in NEEDS.items():
        needed = flag.split()[0][2:].replace("-", "_")
        for name in names.split():
            if not values[needed] and values[name] != defaults[name] and name not in {needed, *reported}:
                reported.add(name)
                yield f"{name}={shown(values[name])} has no effect without {needed}; add {flag} or remove it"


def shown(value: object) -> str:
    """A value as on the command line."""
    return " ".join(value) if isinstance(value, tuple) and all(isinstance(part, str) for part in value) else str(value)
