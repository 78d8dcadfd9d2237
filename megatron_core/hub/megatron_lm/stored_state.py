"""The state of a run as Megatron-LM stores it next to the tensors: arguments, counters, optimizer and schedule."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.heterogeneous import LAYERS_FILE, LAYERS_JSON, write_blocks
from megatron_core.config.hybrid import AHEAD

SHARDING = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
}
"""How the optimizer's state is stored; a loader with the distributed optimizer reads it."""


def common_state(state: Mapping[str, Any], *, has_adam: bool) -> dict[str, Any]:
    """The common state of a checkpoint; ``state`` is that of our checkpoint.

    It fits Megatron Core's Adam with and without the distributed optimizer and 16-bit weights. With expert parallelism
    Megatron Core has a second optimizer, of the experts; it loads the state of two only if two were saved.
    ``has_adam``: whether the tensors of its state are stored; else a loader does not ask for them.
    """
    config = RunConfig.from_flat(state["config"])
    scheduled = state["consumed_samples"] - state["skipped_samples"]
    adam = [_adam(config, state, of_experts=of_experts) for of_experts in (False, True)]
    optimizer = {"optimizer": dict(enumerate(adam)) if config.parallel.expert_model_parallel_size > 1 else adam[0]}
    return {
        "args": Namespace(**arguments(config, state) | {"no_save_optim": not has_adam}),
        "checkpoint_version": 3.0,
        "iteration": state["iteration"],
        "num_floating_point_operations_so_far": 0,
        **(optimizer if has_adam else {}),
        "opt_param_scheduler": _schedule(config, scheduled),
        "content_metadata": SHARDING,
    }


def arguments(config: RunConfig, state: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the training under Megatron-LM's names, as plain values."""
    model = config.model
    flat = {name: list(value) if isinstance(value, tuple) else value for name, value in config.flat().items()}
    gelu = model.openai_gelu and model.add_bias_linear
    if model.hybrid_layer_pattern is not None and model.mtp_layer_pattern is not None:
        ahead = f"{AHEAD}{model.mtp_layer_pattern}" * (model.mtp_num_layers or 0)
        flat["hybrid_layer_pattern"] = model.hybrid_layer_pattern + ahead
    for name in ("moe_layer_freq", "linear_attention_freq"):  # there, a list has an item for each layer
        if flat[name] is not None and len(flat[name]) == 1:
            flat[name] = flat[name][0]
    if model.blocks:  # with all keys, which Megatron Core needs
        flat |= {LAYERS_JSON: write_blocks(model.sized_blocks), LAYERS_FILE: f"{LAYERS_JSON}.json"}
    return flat | {
        "add_bias_linear": model.add_bias_linear,
        "bias_gelu_fusion": gelu,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "max_position_embeddings": config.max_positions,
        "vocab_size": state["vocab_size"],
        "rope_type": "yarn" if model.use_rope_scaling and model.rope_scaling_type == "yarn" else "rope",
        "consumed_train_samples": state["consumed_samples"],
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "no_save_rng": True,
        "ckpt_format": "torch_dist",
    }


def _adam(config: RunConfig, state: Mapping[str, Any], *, of_experts: bool) -> dict[str, Any]:
    """The state of an optimizer without its tensors."""
    steps = int(state["optimizer_steps"])
    groups = [_group(config, steps, decays=decays, of_experts=of_experts) for decays in (True, False)]
    inner = {"state": {"common_step": float(steps)}, "param_groups": groups[: 1 if of_experts else 2]}
    scale = {"grad_scaler": dict(state["loss_scale"])} if state["loss_scale"] else {}
    return {**inner, "optimizer": inner, "param_state_sharding_type": SHARDING["distrib_optim_sharding_type"]} | scale


def _group(config: RunConfig, steps: int, *, decays: bool, of_experts: bool) -> dict[str, Any]:
    """A parameter group, with the settings of torch's and Transformer Engine's optimizers."""
    adam = config.optimizer
    return {
        "lr": adam.lr,
        "betas": (adam.adam_beta1, adam.adam_beta2),
        "eps": adam.adam_eps,
        "weight_decay": adam.weight_decay * decays,
        "step": steps,
        "bias_correction": True,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
        "is_expert_parallel": of_experts,
        "default_config": True,
        "wd_mult": 1.0 if decays else 0.0,
        "lr_mult": 1.0,
        "is_decoupled_lr": False,
        "max_lr": adam.lr,
        "min_lr": adam.min_lr,
    }


def _schedule(config: RunConfig, scheduled: int) -> dict[str, Any]:
    """The schedule of learning rate and weight decay, whose steps are sequences."""
    adam, training = config.optimizer, config.training
    if config.schedules_by_samples:
        total, batch = training.train_samples or 1, 1
        warmup, decay = adam.lr_warmup_samples, adam.lr_decay_samples
    else:
        total, batch = training.train_iters or 1, training.global_batch_size or 1
        warmup, decay = adam.lr_warmup_iters, adam.lr_decay_iters
    decay_steps = (decay or total) * batch
    is_constant = adam.weight_decay_incr_style == "constant"
    return {
        "max_lr": adam.lr,
        "min_lr": adam.min_lr,
        "lr_warmup_steps": warmup * batch if adam.lr_warmup_fraction is None else adam.lr_warmup_fraction * decay_steps,
        "num_steps": scheduled,
        "lr_decay_style": adam.lr_decay_style,
        "lr_decay_steps": decay_steps,
        "start_wd": adam.weight_decay if is_constant else adam.start_weight_decay,
        "end_wd": adam.weight_decay if is_constant else adam.end_weight_decay,
        "wd_incr_style": adam.weight_decay_incr_style,
        "wd_incr_steps": total * batch,
    }
