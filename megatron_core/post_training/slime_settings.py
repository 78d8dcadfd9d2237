"""The configuration of a run from slime's arguments, which are Megatron-LM's and its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_core.checkpoint.folder import TRACKER
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.post_training.verl_settings import LAYOUT, config_of_model
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
SAME_NAMES = (*LAYOUT, *_TABLES["same_names"])
"""Arguments that have the names and values of our settings."""
NOT_READ: Mapping[str, Any] = _TABLES["not_read"]
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
