"""The configuration of a run from slime's arguments, which are Megatron-LM's and its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_core.checkpoint.folder import TRACKER
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.post_training.verl_settings import LAYOUT, config_of_model

SAME_NAMES = (
    *LAYOUT,
    *("sequence_parallel", "bf16", "fp16", "seed", "use_distributed_optimizer", "overlap_grad_reduce"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("optimizer", "lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"),
    *("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init"),
    *("save", "no_save_optim", "no_load_optim", "finetune", "attention_dropout", "hidden_dropout"),
)
"""Arguments that have the names and values of our settings."""
NOT_READ: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("custom_loss_function_path", "custom_advantage_function_path", "custom_tis_function_path"),
            *("custom_pg_loss_reducer_function_path", "rollout_data_postprocess_path", "custom_model_provider_path"),
            *("custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path"),
            *("custom_megatron_before_train_step_hook_path", "custom_update_weight_post_write_path"),
            *("only_train_params_name_list", "freeze_params_name_list", "ref_update_interval", "mtp_num_layers"),
        )
    ),
    **dict.fromkeys(
        (
            *("keep_old_actor", "use_opsm", "use_routing_replay", "use_rollout_routing_replay"),
            *("get_mismatch_metrics", "reset_optimizer_states", "use_stateless_adam", "enable_mtp_training"),
        ),
        False,
    ),
    "rollout_top_p": 1.0,
    "update_weight_mode": "full",
}
"""Arguments that this trainer does not support, with the values that do not need it."""


def config_of_arguments(args: Any, role: str, flags: Mapping[str, Any], world_size: int) -> RunConfig:
    """Our configuration for ``args``; ``flags``: settings of ``megatron-train``, which take precedence.

    The model is that of ``hf_checkpoint``. Errors: ``ConfigError`` for arguments that this trainer does not support.
    """
    unsupported = {name: value for name, none in NOT_READ.items() if (value := getattr(args, name, none)) != none}
    if unsupported:
        values = ", ".join(f"{name}={value}" for name, value in unsupported.items())
        raise ConfigError(f"{values}: this trainer of slime does not support these arguments; leave them out")
    if args.colocate and args.update_weight_transport != "disk":
        raise ConfigError(
            f"colocate=True with update_weight_transport={args.update_weight_transport}: weights on the engines' own "
            "devices are exchanged by files; give --update-weight-transport disk with --update-weight-disk-dir"
        )
    settings = {name: value for name in SAME_NAMES if (value := getattr(args, name, None)) is not None}
    if args.use_dynamic_batch_size:
        settings["seq_length"] = args.max_tokens_per_gpu * settings.get("context_parallel_size", 1)
    elif "seq_length" not in flags:
        raise ConfigError(
            "use_dynamic_batch_size=False: give slime_trainer(seq_length=...), the length of the longest text, or "
            "--use-dynamic-batch-size with --max-tokens-per-gpu"
        )
    # slime starts from ``load`` if it has a checkpoint, and else from a folder of Hugging Face.
    load = Path(args.load) if args.load is not None else None
    is_checkpoint = load is not None and (load / TRACKER).is_file()
    weights = args.load if load is not None and (load / "config.json").is_file() else args.hf_checkpoint
    settings |= {"load_hf": str(weights), "load": args.load if is_checkpoint else None}
    steps = args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    settings |= {"train_iters": max(steps, 1), "micro_batch_size": 1, "value_head": role == "critic"}
    return config_of_model(args.hf_checkpoint, {**settings, **flags}, world_size)
