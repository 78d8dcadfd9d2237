"""The configuration of a run from verl's configurations of a model, an engine and an optimizer."""

from collections.abc import Mapping
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.hub.hugging_face import config_of_folder
from megatron_core.parallel.configured import grid_of

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Settings with the same names in verl's configuration of an engine."""
OPTIMIZER = {
    "lr": "lr",
    "min_lr": "min_lr",
    "weight_decay": "weight_decay",
    "clip_grad": "clip_grad",
    "total_training_steps": "train_iters",
    "lr_warmup_steps": "lr_warmup_iters",
    "lr_decay_style": "lr_decay_style",
}
"""Settings of verl's optimizer, and ours."""


def run_config(model_config: Any, engine_config: Any, optimizer_config: Any, world_size: int) -> RunConfig:
    """Our configuration of verl's three. Errors: ``ConfigError`` if the length of texts is missing."""
    lengths = [getattr(engine_config, name, None) for name in ("max_token_len_per_gpu", "infer_max_token_len_per_gpu")]
    longest = max((length for length in lengths if length is not None), default=None)
    flags = dict(getattr(engine_config, "override_transformer_config", None) or {})
    if longest is None and "seq_length" not in flags:
        raise ConfigError(
            "max_token_len_per_gpu=None: give the length of the longest text, or override_transformer_config.seq_length"
        )
    path = getattr(model_config, "local_path", None) or model_config.path
    settings: dict[str, Any] = {"load_hf": str(path), "seq_length": longest, "micro_batch_size": 1}
    settings |= {name: value for name in LAYOUT if (value := getattr(engine_config, name, None)) is not None}
    settings["sequence_parallel"] = settings.get("tensor_model_parallel_size", 1) > 1
    settings["bf16"] = getattr(engine_config, "dtype", "bfloat16") == "bfloat16"
    settings["seed"] = getattr(engine_config, "seed", 42)
    settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "lr_decay_style": "constant"}
    settings["value_head"] = getattr(model_config, "model_type", None) == "value_model"
    if rank := getattr(model_config, "lora_rank", 0):
        settings |= {"lora_rank": rank, "lora_alpha": getattr(model_config, "lora_alpha", rank)}
    for theirs, ours in OPTIMIZER.items():
        value = getattr(optimizer_config, theirs, None)
        # verl writes -1 for a number that is not set.
        if value is not None and value != -1:
            settings[ours] = value
    if betas := getattr(optimizer_config, "betas", None):
        settings |= {"adam_beta1": betas[0], "adam_beta2": betas[1]}
    settings.setdefault("train_iters", 1_000_000)
    return config_of_model(path, settings | flags, world_size)


def config_of_model(path: str, settings: Mapping[str, Any], world_size: int) -> RunConfig:
    """The configuration of the model in a folder of Hugging Face, with ``settings``."""
    config = RunConfig.from_flat({**config_of_folder(path).flat(), **settings})
    # Each step has the texts that the other program sends; the configured number must only be legal.
    batch = config.training.micro_batch_size * grid_of(config.parallel, world_size).size("dp")
    return RunConfig.from_flat(config.flat() | {"global_batch_size": batch})
