"""Settings that this run does not read: scripts give them everywhere, so they are named and not refused."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields
from typing import Any

from megatron_core.config.attention import attention_of
from megatron_core.config.model import ModelConfig
from megatron_core.config.optimizers import settings_by_readers
from megatron_core.config.rules_data import DIVIDED
from megatron_core.config.rules_ranges import NEEDS, shown
from megatron_core.config.run import RunConfig
from megatron_core.config.training import OptimizerConfig

Values = dict[str, Any]

UNREAD: tuple[tuple[str, Callable[[Values], Any], str], ...] = (
    (
        "with --skip-train",
        lambda v: not v["skip_train"],
        f"{' '.join(each.name for each in fields(OptimizerConfig))} save save_interval async_save exit_interval "
        "exit_duration_in_mins eval_interval max_bad_steps iterations_to_skip grad_compression grad_reduce_in_bf16 "
        "overlap_grad_reduce recompute_granularity",
    ),
    (
        "several ranks",
        lambda v: v["world_size"] > 1,
        "rank_order distributed_backend replica_check_interval",
    ),
    (
        "several data-parallel ranks",
        lambda v: v["data_ranks"] > 1,
        "overlap_grad_reduce overlap_param_gather grad_reduce_in_bf16 grad_compression zero3_keep_after_forward "
        "fp8_param_gather ddp_bucket_size",
    ),
    (
        "several data-parallel ranks",
        lambda v: v["data_ranks"] > 1 or v["zero3_param_offload_dir"],
        "use_distributed_optimizer zero_stage data_parallel_sharding_strategy",
    ),
    (
        "gradients in bfloat16 and --zero-stage 1 or more",
        lambda v: v["reduces_in_bf16"] and v["dp_zero_stage"],
        "ddp_reduce_scatter_with_fp32_accumulation",
    ),
    ("with --optimizer-offload-dir", lambda v: v["optimizer_offload_dir"] is None, "optimizer_cpu_offload"),
    ("a GPU", lambda v: v["device"] != "cpu", "optimizer_cpu_offload cpu_offloading"),
    (
        "with experts of --moe-ffn-hidden-size in every layer",
        lambda v: v["dense_layers"] or not v["moe_ffn_hidden_size"],
        "ffn_hidden_size",
    ),
    ("--disable-bias-linear", lambda v: v["disable_bias_linear"], "add_qkv_bias"),
    (
        "with --softmax-scale",
        lambda v: v["softmax_scale"] is None,
        "mup_attn_scale_power mup_base_head_dim",
    ),
    (
        "--attention-backend unfused, or dropout or soft capping of attention",
        lambda v: v["attention_backend"] == "unfused" or v["attention_dropout"] or v["attn_logit_softcapping"],
        "apply_query_key_layer_scaling",
    ),
    (
        "a layer with the window",
        lambda v: v["windowed_layers"],
        "window_size window_attn_skip_freq rotary_base_of_windows",
    ),
    (
        "another --rope-scaling-type",
        lambda v: v["rope_scaling_type"] != "ntk",
        "original_max_position_embeddings",
    ),
    ("with --yarn-attention-factor", lambda v: v["yarn_attention_factor"] is None, "mscale"),
    (
        "with --yarn-attention-factor",
        lambda v: v["yarn_attention_factor"] is None or (v["multi_latent_attention"] and v["softmax_scale"] is None),
        "mscale_all_dim",
    ),
    ("--num-experts N", lambda v: v["num_experts"], "expert_tensor_parallel_size"),
    (
        "--moe-aux-loss-coeff X",
        lambda v: v["moe_aux_loss_coeff"] or not v["moe_router_load_balancing_type"].endswith("aux_loss"),
        "moe_router_load_balancing_type",
    ),
    (
        "with --moe-router-load-balancing-type sinkhorn",
        lambda v: v["moe_router_load_balancing_type"] != "sinkhorn",
        "moe_router_pre_softmax moe_router_topk_scaling_factor",
    ),
    (
        "with --moe-router-force-load-balancing",
        lambda v: not v["moe_router_force_load_balancing"],
        "moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias",
    ),
    (
        "experts split over ranks",
        lambda v: v["expert_ranks"] > 1,
        "moe_token_dispatcher_type moe_shared_expert_overlap",
    ),
    (
        "--moe-shared-expert-intermediate-size N",
        lambda v: v["moe_shared_expert_intermediate_size"],
        "moe_shared_expert_overlap",
    ),
    ("--fp8-amax-compute-algo max", lambda v: v["fp8_amax_compute_algo"] == "max", "fp8_amax_history_len"),
    ("--fp8-amax-history-len 2 or more", lambda v: v["fp8_amax_history_len"] > 1, "fp8_amax_compute_algo"),
    (
        "--position-embedding-type rope",
        lambda v: v["has_rotary"],
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
        "--main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype bf16",
        lambda v: "bf16" in (v["main_params_dtype"], v["exp_avg_dtype"], v["exp_avg_sq_dtype"]),
        "use_precision_aware_optimizer",
    ),
    (
        "--optimizer muon and --zero-stage 1",
        lambda v: v["optimizer"] == "muon" and v["dp_zero_stage"] == 1,
        "use_layer_wise_param_layout",
    ),
    ("a second moment", lambda v: "exp_avg_sq_dtype" in v["moment_dtypes"], "exp_avg_sq_dtype"),
    ("a first moment", lambda v: "exp_avg_dtype" in v["moment_dtypes"], "exp_avg_dtype"),
    (
        "a warm-up",
        lambda v: v["lr_warmup_iters"] or v["lr_warmup_samples"] or v["lr_warmup_fraction"],
        "lr_warmup_init",
    ),
    ("--weight-decay-incr-style constant", lambda v: v["weight_decay_incr_style"] == "constant", "weight_decay"),
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
    ("--data-path", lambda v: any(v[name] for name in DIVIDED), "split"),
    (
        "token files",
        lambda v: not v["mock_data"] and v["dataloader_type"] != "external",
        "data_order eod_mask_loss num_dataset_builder_threads",
    ),
    (
        "positions",
        lambda v: v["position_embedding_type"] != "none" or v["has_rotary"],
        "reset_position_ids",
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
    (
        "--eval-iters N",
        lambda v: v["eval_iters"],
        "eval_interval eval_global_batch_size valid_data_path test_data_path",
    ),
    ("--save FOLDER", lambda v: v["save"], "no_save_optim save_bad_steps"),
    (
        "--load FOLDER",
        lambda v: v["load"],
        "no_load_optim verify_checkpoint override_opt_param_scheduler use_checkpoint_opt_param_scheduler "
        "exit_on_missing_checkpoint",
    ),
    (
        "with --finetune",
        lambda v: not v["finetune"],
        "no_load_optim override_opt_param_scheduler",
    ),
    (
        "with --use-checkpoint-opt-param-scheduler",
        lambda v: not v["use_checkpoint_opt_param_scheduler"],
        "override_opt_param_scheduler",
    ),
    ("--max-bad-steps N", lambda v: v["max_bad_steps"], "max_rollbacks"),
    (
        "--profile",
        lambda v: v["profile"],
        "profile_step_start profile_step_end profile_ranks profile_dir use_pytorch_profiler "
        "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack",
    ),
    (
        "--use-pytorch-profiler",
        lambda v: v["use_pytorch_profiler"],
        "pytorch_profiler_collect_shapes pytorch_profiler_collect_callstack",
    ),
    ("with --no-record-times", lambda v: v["record_times"], "peak_tflops"),
    ("--wandb-project NAME", lambda v: v["wandb_project"], "wandb_exp_name wandb_entity wandb_save_dir"),
    ("--mlflow-experiment NAME", lambda v: v["mlflow_experiment"], "mlflow_run_name mlflow_tracking_uri"),
    ("--log-straggler", lambda v: v["log_straggler"], "straggler_minmax_count"),
    ("--timing-log-level 1", lambda v: v["timing_log_level"], "timing_log_option"),
)
"""What is needed, or after "with" what is in the way; whether the run has it; the settings without effect otherwise."""


def unread_settings(
    config: RunConfig, world_size: int = 1, device: str = "cpu", names: Collection[str] | None = None
) -> str:
    """The settings without effect on this number of ranks and kind of device, with the reason; empty if none.

    ``names``: those to look at; by default all that differ from their defaults.
    """
    values, defaults = config.flat(), RunConfig().flat()
    names = [name for name in values if values[name] != defaults[name]] if names is None else names
    known, told, reported = values | _derived(config, world_size, device), [], set[str]()
    for needed, given, listed in (*UNREAD, *_of_optimizers(), *_needs()):
        found = [name for name in listed.split() if name in names and name not in reported]
        if found and not given(known):
            reason = needed if needed.startswith("with ") else f"without {needed}"
            told.append(f"{', '.join(f'{name}={shown(values[name])}' for name in found)} ({reason})")
            reported.update(found)
    if "recompute_modules" in names and config.model.recompute_granularity == "selective":
        told += _absent_parts(config.model)
    return "; ".join(told)


def _absent_parts(model: ModelConfig) -> Iterator[str]:
    """Parts for selective recompute that no layer has."""
    experts, layers = len(model.expert_layers), range(model.num_layers)
    shared = experts and model.moe_shared_expert_intermediate_size
    needed = {
        "layernorm": (model.norm_placement != "post", "norms before attention and MLP"),
        "mla_up_proj": (model.multi_latent_attention, "--multi-latent-attention"),
        "mlp": (len([layer for layer in layers if not model.has_experts(layer)]), "a layer without experts"),
        "moe": (experts, "--num-experts N"),
        "moe_act": (experts, "--num-experts N"),
        "shared_experts": (shared, "--moe-shared-expert-intermediate-size N"),
    }
    for part in model.recompute_modules:
        is_there, what = needed.get(part, (True, ""))
        if not is_there:
            yield f"recompute_modules={part} (without {what})"


def _of_optimizers() -> list[tuple[str, Callable[[Values], Any], str]]:
    """Entries for the settings of single optimizers."""

    def entry(readers: tuple[str, ...], names: list[str]) -> tuple[str, Callable[[Values], Any], str]:
        return f"--optimizer {' or '.join(readers)}", lambda v: v["optimizers"] & set(readers), " ".join(names)

    return [entry(readers, names) for readers, names in settings_by_readers().items()]


def _needs() -> list[tuple[str, Callable[[Values], Any], str]]:
    """The entries of ``NEEDS``, which are refused unless they have their defaults, as entries of ``UNREAD``."""

    def entry(flag: str, listed: str) -> tuple[str, Callable[[Values], Any], str]:
        needed = flag.split()[0][2:].replace("-", "_")
        return flag, lambda v: v[needed], " ".join(name for name in listed.split() if name != needed)

    return [entry(flag, listed) for flag, listed in NEEDS.items()]


def _derived(config: RunConfig, world_size: int, device: str) -> Values:
    """What conditions need beside the settings themselves."""
    parallel, model = config.parallel, config.model
    copies = parallel.data_parallel_size(world_size) * parallel.context_parallel_size
    expert_copies = world_size // parallel.expert_model_size if model.num_experts else 1
    return {
        "world_size": world_size,
        "device": device,
        "data_ranks": max(copies, expert_copies),
        "expert_ranks": parallel.expert_model_parallel_size * parallel.expert_tensor_size,
        "dense_layers": not all(map(model.has_experts, range(model.num_layers))),
        "windowed_layers": any(model.window_of_layer(layer) is not None for layer in range(model.num_layers)),
        "optimizers": {kind.name for kind in config.optimizer.kinds},
        "moment_dtypes": {
            moment.dtype_setting for kind in config.optimizer.kinds for moment in kind.moments(config.optimizer)
        },
        "has_rotary": attention_of(model).has_rotary,
        "reduces_in_bf16": parallel.reduces_in_bf16,
        "dp_zero_stage": parallel.dp_zero_stage,
    }
