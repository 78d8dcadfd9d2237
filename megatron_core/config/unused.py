"""Settings that this run does not read: scripts give them everywhere, so they are named and not refused."""

from collections.abc import Callable
from typing import Any

from megatron_core.config.rules_ranges import shown
from megatron_core.config.run import RunConfig

Values = dict[str, Any]

UNREAD: tuple[tuple[str, Callable[[Values], Any], str], ...] = (
    (
        "--position-embedding-type rope",
        lambda v: v["position_embedding_type"] == "rope" or v["multi_latent_attention"],
        "rotary_base rotary_base_of_windows rotary_percent rotary_interleaved",
    ),
    ("--use-rope-scaling", lambda v: v["use_rope_scaling"], "rope_scaling_factor original_max_position_embeddings"),
    (
        "--rope-scaling-type yarn",
        lambda v: v["use_rope_scaling"] and v["rope_scaling_type"] == "yarn",
        "yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int mscale mscale_all_dim yarn_attention_factor",
    ),
    ("--qk-layernorm", lambda v: v["qk_layernorm"], "qk_layernorm_over_heads"),
    ("--window-size BEFORE 0", lambda v: v["window_size"], "rotary_base_of_windows"),
    ("an activation of GELU", lambda v: not v["swiglu"] and not v["squared_relu"], "openai_gelu"),
    ("--cpu-offloading", lambda v: v["cpu_offloading"], "cpu_offloading_num_layers"),
    ("--no-multi-latent-attention", lambda v: not v["multi_latent_attention"], "kv_channels"),
    (
        "--moe-router-score-function softmax",
        lambda v: v["moe_router_score_function"] == "softmax",
        "moe_router_pre_softmax",
    ),
    ("--context-parallel-size N", lambda v: v["context_parallel_size"] > 1, "cp_comm_type"),
    (
        "--tensor-model-parallel-size N",
        lambda v: v["tensor_model_parallel_size"] > 1,
        "sequence_parallel tp_comm_overlap",
    ),
    (
        "--pipeline-model-parallel-size N",
        lambda v: v["pipeline_model_parallel_size"] > 1,
        "overlap_p2p_communication account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
    ),
    (
        "--grad-compression powersgd or onebit-adam",
        lambda v: v["grad_compression"] in ("powersgd", "onebit-adam"),
        "grad_compression_warmup_iters",
    ),
    ("--grad-compression powersgd", lambda v: v["grad_compression"] == "powersgd", "powersgd_rank"),
    (
        "--optimizer adam or muon",
        lambda v: v["optimizer"] == "adam" or (v["optimizer"], v["muon_scalar_optimizer"]) == ("muon", "adam"),
        "adam_beta1 adam_beta2 adam_eps",
    ),
    (
        "--main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype bf16",
        lambda v: "bf16" in (v["main_params_dtype"], v["exp_avg_dtype"], v["exp_avg_sq_dtype"]),
        "use_precision_aware_optimizer",
    ),
    ("--optimizer sgd", lambda v: v["optimizer"] == "sgd", "sgd_momentum"),
    (
        "--optimizer lion",
        lambda v: v["optimizer"] == "lion" or (v["optimizer"], v["muon_scalar_optimizer"]) == ("muon", "lion"),
        "lion_beta1 lion_beta2",
    ),
    (
        "--optimizer muon",
        lambda v: v["optimizer"] == "muon",
        "muon_momentum muon_nesterov muon_split_qkv muon_scale_mode muon_extra_scale_factor muon_num_ns_steps "
        "muon_coefficient_type muon_fp32_matmul_prec muon_scalar_optimizer use_layer_wise_param_layout",
    ),
    ("--lr-decay-style WSD", lambda v: v["lr_decay_style"] == "WSD", "lr_wsd_decay_style"),
    (
        "another --lr-decay-style",
        lambda v: v["lr_decay_style"] != "constant",
        "min_lr decoupled_min_lr lr_decay_iters lr_decay_samples",
    ),
    (
        "--fp16 with a dynamic loss scale",
        lambda v: v["fp16"] and v["loss_scale"] is None,
        "initial_loss_scale min_loss_scale loss_scale_window hysteresis",
    ),
    (
        "--fim-data",
        lambda v: v["fim_data"],
        "fim_rate fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token",
    ),
    (
        "--data-order megatron",
        lambda v: v["data_order"] == "megatron",
        "data_cache_path mid_level_dataset_surplus",
    ),
    (
        "a --tokenizer-type that reads it",
        lambda v: v["tokenizer_type"] not in (None, "GPT2BPETokenizer", "ByteLevelTokenizer", "NullTokenizer"),
        "tokenizer_model",
    ),
    (
        "--tokenizer-type GPT2BPETokenizer",
        lambda v: v["tokenizer_type"] in (None, "GPT2BPETokenizer") and v["vocab_file"] and v["merge_file"],
        "vocab_file merge_file",
    ),
    (
        "--tokenizer-type TikTokenizer",
        lambda v: v["tokenizer_type"] == "TikTokenizer",
        "tiktoken_pattern tiktoken_num_special_tokens",
    ),
    ("--eval-iters N", lambda v: v["eval_iters"], "eval_interval eval_global_batch_size"),
    ("--save FOLDER", lambda v: v["save"], "no_save_optim save_bad_steps"),
    (
        "--load FOLDER",
        lambda v: v["load"],
        "no_load_optim verify_checkpoint override_opt_param_scheduler use_checkpoint_opt_param_scheduler "
        "exit_on_missing_checkpoint",
    ),
    ("--max-bad-steps N", lambda v: v["max_bad_steps"], "max_rollbacks"),
    (
        "--profile",
        lambda v: v["profile"],
        "profile_step_start profile_step_end profile_ranks profile_dir use_pytorch_profiler "
        "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack",
    ),
    ("--wandb-project NAME", lambda v: v["wandb_project"], "wandb_exp_name wandb_entity wandb_save_dir"),
    ("--mlflow-experiment NAME", lambda v: v["mlflow_experiment"], "mlflow_run_name mlflow_tracking_uri"),
    ("--log-straggler", lambda v: v["log_straggler"], "straggler_minmax_count"),
    ("--timing-log-level 1", lambda v: v["timing_log_level"], "timing_log_option"),
)
"""What is needed, whether it is given, and the settings that are not read without it."""


def unread_settings(config: RunConfig) -> str:
    """The settings that differ from their defaults and have no effect, with what would give them one; empty if none."""
    values, defaults = config.flat(), RunConfig().flat()
    told = []
    for needed, given, names in UNREAD:
        found = [name for name in names.split() if values[name] != defaults[name]]
        if found and not given(values):
            told.append(f"{', '.join(f'{name}={shown(values[name])}' for name in found)} (without {needed})")
    return "; ".join(told)
