"""Rules for single settings: whole numbers above zero, finite numbers, fractions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from megatron_core.config.run import RunConfig

_AT_LEAST_ONE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "q_lora_rank",
    "mtp_num_layers",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "make_vocab_size_divisible_by",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "recompute_num_layers",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "ddp_bucket_size",
    "powersgd_rank",
    "num_distributed_optimizer_instances",
    "micro_batch_size",
    "straggler_minmax_count",
    "global_batch_size",
    "eval_global_batch_size",
    "train_iters",
    "train_samples",
    "eval_interval",
    "exit_interval",
    "lr_decay_iters",
    "lr_wsd_decay_iters",
    "muon_num_ns_steps",
    "lr_decay_samples",
    "lr_wsd_decay_samples",
    "save_retain_interval",
    "keep_last",
    "non_persistent_save_interval",
    "loss_scale_window",
    "hysteresis",
    "seq_length",
    "vocab_size",
    "save_interval",
    "log_interval",
    "replica_check_interval",
    "num_dataset_builder_threads",
)
_AT_LEAST_ZERO = (
    "grad_compression_warmup_iters",
    "cpu_offloading_num_layers",
    "eval_iters",
    "seed",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "ckpt_step",
    "num_workers",
    "tiktoken_num_special_tokens",
    "max_bad_steps",
    "max_rollbacks",
    "save_bad_steps",
)
_ABOVE_ZERO = (
    "rotary_seq_len_interpolation_factor",
    "rope_scaling_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_attention_factor",
    "rotary_base",
    "norm_epsilon",
    "init_method_std",
    "embedding_init_method_std",
    "distributed_timeout_minutes",
    "exit_duration_in_mins",
    "adam_eps",
    "peak_tflops",
    "decoupled_lr",
    "loss_scale",
    "initial_loss_scale",
    "min_loss_scale",
    "moe_router_topk_scaling_factor",
    "moe_router_bias_update_rate",
    "moe_expert_capacity_factor",
    "spike_factor",
)
_NOT_NEGATIVE = (
    "mscale",
    "mscale_all_dim",
    "min_lr",
    "lr_warmup_init",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "clip_grad",
    "clip_grad_value",
    "decoupled_min_lr",
    "mid_level_dataset_surplus",
    "mtp_loss_scaling_factor",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
)
_BELOW_ONE = (
    "hidden_dropout",
    "attention_dropout",
    "adam_beta1",
    "adam_beta2",
    "sgd_momentum",
    "lion_beta1",
    "lion_beta2",
    "muon_momentum",
    "lr_warmup_fraction",
    "moe_input_jitter_eps",
)


def range_problems(config: RunConfig) -> Iterator[str]:
    """Settings whose value is out of range, independent of other settings; ``None`` is always legal."""
    values = config.flat()
    yield from _outside(values, _AT_LEAST_ONE, lambda x: x >= 1, "1, 2, 3, ...")
    yield from _outside(values, _AT_LEAST_ZERO, lambda x: x >= 0, "0, 1, 2, ...")
    yield from _outside(values, _ABOVE_ZERO, lambda x: 0 < x < math.inf, "a finite number above 0")
    yield from _outside(values, _NOT_NEGATIVE, lambda x: 0 <= x < math.inf, "0 or a finite number above it")
    if config.training.skip_train:
        yield from _outside(values, ["lr"], lambda x: 0 <= x < math.inf, "0 or a finite number above it")
    else:
        legal = "a finite number above 0 (0 with --skip-train)"
        yield from _outside(values, ["lr"], lambda x: 0 < x < math.inf, legal)
    yield from _outside(values, _BELOW_ONE, lambda x: 0 <= x < 1, "from 0 up to, not including, 1")
    yield from _outside(
        values, ["rotary_percent", "optimizer_offload_fraction"], lambda x: 0 < x <= 1, "above 0 and up to 1"
    )


def _outside(
    values: dict[str, Any], names: Iterable[str], is_legal: Callable[[float], bool], legal: str
) -> Iterator[str]:
    """A message for each of the settings ``names`` whose value is not legal; NaN never is."""
    for name in names:
        if values[name] is not None and not is_legal(values[name]):
            yield f"{name}={values[name]} is out of range; legal: {legal}"
