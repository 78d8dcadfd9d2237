"""The state that Megatron-LM stores next to its tensors, read and written: arguments, counters, optimizer, schedule."""

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_core.config import ModelConfig, RunConfig
from megatron_core.config.run import aliases, field_types
from megatron_core.config.setting import Resume, names_by_resume
from megatron_core.config.values import convert
from megatron_core.errors import CheckpointError, quoted
from megatron_core.features.layer_sizes.settings import LAYERS_FILE, LAYERS_JSON, HeterogeneousConfig, write_blocks
from megatron_core.features.multi_token.settings import MultiTokenConfig
from megatron_core.features.positions.settings import PositionConfig
from megatron_core.features.recurrent.settings import AHEAD, RecurrentConfig, read_pattern
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
OFF: Mapping[str, list[Any]] = _TABLES["off"]
"""Arguments of unsupported features that change the model's function -> the values with which they are off."""
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")
TRAINING: list[str] = _TABLES["training"]
"""Training settings that have the same name and meaning in both programs."""
GATED_DELTA_PRODUCTS = frozenset({"gdp_stack_spec", "gated_delta_product_stack_spec"})
"""Names of Megatron Core's specification of a hybrid model with gated delta products instead of Mamba-2 mixers."""
REMEDY = "use the weights alone: convert with --no-optimizer, or load with --finetune"


def settings_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings of the model, its vocabulary and, if its files exist, its tokenizer.

    Errors: ``CheckpointError`` for an argument that is not supported.
    """
    for name, values in OFF.items():
        if arguments.get(name, values[0]) not in values:
            raise CheckpointError(_unsupported(name, arguments[name]))

    # Translate names, and arguments with another form here; an argument with our name precedes its aliases.
    present = {name: value for name, value in arguments.items() if value is not None}
    renamed = {aliases().get(name, name): value for name, value in present.items()} | present
    renamed |= {"disable_bias_linear": not arguments.get("add_bias_linear", True)}
    renamed |= _positions(arguments)
    renamed[LAYERS_JSON] = arguments.get(LAYERS_JSON) or None
    if renamed[LAYERS_JSON] is None and (path := arguments.get(LAYERS_FILE)):
        raise CheckpointError(_unsupported(LAYERS_FILE, path) + f" without the content of the file, {LAYERS_JSON}")
    if isinstance(pattern := renamed.get("hybrid_layer_pattern"), str):
        renamed["hybrid_layer_pattern"], implied = read_pattern(pattern)
        if "experimental_attention_variant" in implied:
            raise CheckpointError(_unsupported("hybrid_layer_pattern", pattern) + ": layers D have indexers")
        renamed |= {name: value for name, value in implied.items() if name.startswith("mtp_")}
    if not GATED_DELTA_PRODUCTS.isdisjoint(re.findall(r"\w+", str(arguments.get("spec")))):
        renamed["mamba_mixer"] = "gated_delta_product"
    if "float32" in str(arguments.get("logit_dtype")):
        renamed["output_logit_dtype"] = "fp32"
    plain = not any(arguments.get(name) for name in ("swiglu", "quick_geglu", "squared_relu"))
    if plain and arguments.get("bias_gelu_fusion") and arguments.get("add_bias_linear", True):
        renamed["openai_gelu"] = True  # the fused kernel computes the approximation by tanh
    if renamed.get("moe_expert_capacity_factor") is not None:
        renamed["moe_capacity_per"] = "micro_batch"
    if arguments.get("mtp_num_layers") and arguments.get("num_experts"):
        renamed["mtp_zero_last_input"] = True
    variant = renamed.get("experimental_attention_variant")
    if variant == "gdn":  # its name since August 2026
        variant = renamed["experimental_attention_variant"] = "gated_delta_net"
    unread = []
    if variant != "gated_delta_net" and "G" not in (renamed.get("hybrid_layer_pattern") or ""):
        unread.append("linear_")
    if variant != "dsa":
        unread.append("dsa_")
    renamed = {name: value for name, value in renamed.items() if not name.startswith(tuple(unread))}
    if not arguments.get("num_experts"):
        renamed = {name: value for name, value in renamed.items() if not name.startswith("moe_")}
    if not arguments.get("group_query_attention"):
        renamed.pop("num_query_groups", None)  # Megatron-LM sets it to a default

    # Keep and convert the settings of the model.
    wanted = [*names_by_resume(ModelConfig, *(set(Resume) - {Resume.FREE})), "seq_length", "vocab_size"]
    settings = {name: _converted(name, renamed[name]) for name in wanted if name in renamed and name not in TRAINING}
    return settings | _tokenizer(renamed)


def _unsupported(name: str, value: Any) -> str:
    return f"the checkpoint was trained with {name}={quoted(value)}, which is not supported"


def _converted(name: str, value: Any, remedy: str = "") -> Any:
    """A stored value as the type of the setting ``name``."""
    try:
        return convert(list(value) if isinstance(value, tuple) else value, field_types()[name])
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(_unsupported(name, value) + remedy) from None


def _positions(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Position embeddings; Megatron-LM has a separate type for rotary positions with YaRN."""
    embedding_type = arguments.get("position_embedding_type", "learned_absolute")
    latent = bool(arguments.get("multi_latent_attention"))
    if latent or arguments.get("use_rotary_position_embeddings"):
        embedding_type = "rope" if embedding_type != "yarn" else embedding_type
    yarn = embedding_type == "yarn" or (latent and arguments.get("rope_type") in (None, "yarn"))
    if not yarn:
        return {"position_embedding_type": embedding_type}
    original = arguments.get("yarn_original_max_position_embeddings") or 4096
    scaled = {"use_rope_scaling": True, "rope_scaling_type": "yarn", "original_max_position_embeddings": original}
    default = 32.0 if arguments.get("enable_gpt_oss") else None  # the factor that this flag stands for
    named = [arguments.get(name) for name in ("yarn_rotary_scaling_factor", "rotary_scaling_factor")]
    factors = named[1:] if latent else [named[0], default, named[1]]
    factor = next((value for value in factors if value is not None), None)
    if factor is not None:
        scaled["rope_scaling_factor"] = factor  # rope_scaling_factor is that of Llama 3
    return {"position_embedding_type": "rope", **scaled}


def _tokenizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer, if its type is supported and its files are still in their places."""
    from megatron_core.tokenizers import tokenizer_kinds

    files = {name: str(settings[name]) for name in TOKENIZER_FILES if settings.get(name)}
    tokenizer_type = settings.get("tokenizer_type")
    if tokenizer_type not in tokenizer_kinds() or not files or not all(Path(path).exists() for path in files.values()):
        return {}
    return {"tokenizer_type": tokenizer_type, **files}


@dataclass(frozen=True)
class MegatronProgress:
    """The position of a training and the settings that continue it."""

    iteration: int
    consumed_samples: int
    skipped_samples: int
    """Sequences of the steps without an update, which do not count for the schedule."""
    skipped_iterations: int
    optimizer_steps: int
    loss_scale: Mapping[str, float]
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, common: Mapping[str, Any], arguments: Mapping[str, Any], optimizer: Any, folder: Path
    ) -> "MegatronProgress":
        """Read the counters. Errors: ``CheckpointError`` for one that is absent or not an integer."""
        schedule = common.get("opt_param_scheduler")
        counters = {
            "iteration": common.get("iteration"),
            "consumed_train_samples": arguments.get("consumed_train_samples"),
            "optimizer step": optimizer_step(optimizer, schedule),
            "num_steps of opt_param_scheduler": schedule.get("num_steps") if isinstance(schedule, dict) else None,
        }
        for name, value in counters.items():
            if type(value) is not int or value < 0:
                raise CheckpointError(
                    f"{folder} has no valid {name} ({quoted(value)}), which training needs to continue; {REMEDY}"
                )
        iteration, samples, steps, scheduled = (int(value) for value in counters.values() if value is not None)
        skipped = max(samples - scheduled, 0)
        settings = training_settings(arguments)
        skipped_steps = skipped // (settings.get("global_batch_size") or 1)
        if settings.get("step_batch_size_schedule") or settings.get("rampup_batch_size"):
            skipped_steps = max(iteration - steps, 0)  # the steps have different numbers of samples
        return cls(iteration, samples, skipped, skipped_steps, steps, _loss_scale(optimizer), settings)


def training_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the training in the arguments.

    Errors: ``CheckpointError`` for a value that is not supported.
    """
    if arguments.get("mtp_detach_heads"):
        raise CheckpointError(f"{_unsupported('mtp_detach_heads', True)}; {REMEDY}")
    stated = {name: arguments[name] for name in TRAINING if arguments.get(name) is not None}
    last_step = arguments.get("curr_iteration")
    samples = arguments.get("consumed_train_samples")
    if last_step is not None and samples == (last_step + 1) * arguments.get("global_batch_size", 0):
        stated.pop("rampup_batch_size", None)  # Megatron Core 0.19 and later ignores it
    return {name: _converted(name, value, f"; {REMEDY}") for name, value in _as_given(stated).items()}


def _as_given(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The training settings without the values that Megatron-LM derives from others at its start."""
    settings = dict(arguments)
    is_constant = settings.get("weight_decay_incr_style", "constant") == "constant"
    if is_constant:
        settings = {name: value for name, value in settings.items() if not name.endswith("_weight_decay")}
    warms_up = any(settings.get(name) for name in ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"))
    if warms_up or not is_constant or settings.get("lr_decay_style") != "constant":
        settings["lr_one_step_later"] = True
    for unit in ("iters", "samples"):
        if settings.get(f"lr_decay_{unit}") == settings.get(f"train_{unit}"):
            settings.pop(f"lr_decay_{unit}", None)
    if settings.get("train_samples"):
        settings.pop("train_iters", None)
        settings.pop("lr_decay_iters", None)
    if settings.get("decoupled_lr") is not None:
        settings["positions_as_matrices"] = True
    if settings.get("step_batch_size_schedule"):
        settings["step_batch_size_schedule"] = settings["step_batch_size_schedule"].split()
        settings.pop("global_batch_size", None)  # a micro-batch of each data-parallel rank
    if settings.get("rampup_batch_size"):
        settings["rampup_batch_size"] = [int(size) for size in settings["rampup_batch_size"]]  # texts, if from flags
    return settings | {"data_order": "megatron"}


def _loss_scale(optimizer: Any) -> dict[str, float]:
    """The state of the dynamic loss scale; empty without one."""
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, dict) else None
    state = getattr(scaler, "arguments", scaler)
    numbers = state.items() if isinstance(state, dict) else ()
    return {str(name): value.item() if isinstance(value, torch.Tensor) else value for name, value in numbers}


def optimizer_step(optimizer: Any, schedule: Any) -> int | None:
    """Adam's step count; each optimizer class of Megatron Core stores it in a different place, and none before the
    first update, which the schedule counts, too."""
    if not isinstance(optimizer, dict):
        return None
    if isinstance(schedule, Mapping) and schedule.get("num_steps") == 0:
        return 0
    inner = optimizer.get("optimizer", optimizer)
    state = inner.get("state") or {}
    groups = inner.get("param_groups") or []
    first = state.get(0, {}).get("step") if isinstance(state.get(0), dict) else None
    for value in (state.get("common_step"), first, *(group.get("step") for group in groups)):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, int | float) and value == int(value):
            return int(value)
    return None


SHARDING: Mapping[str, Any] = _TABLES["sharding"]
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
    model = config.model.section(RecurrentConfig)
    flat = {name: list(value) if isinstance(value, tuple) else value for name, value in config.flat().items()}
    gelu = model.openai_gelu and model.add_bias_linear
    if model.hybrid_layer_pattern is not None and model.mtp_layer_pattern is not None:
        ahead = f"{AHEAD}{model.mtp_layer_pattern}" * (model.section(MultiTokenConfig).mtp_num_layers or 0)
        flat["hybrid_layer_pattern"] = model.hybrid_layer_pattern + ahead
    for name in ("moe_layer_freq", "linear_attention_freq"):  # there, a list has an item for each layer
        if flat[name] is not None and len(flat[name]) == 1:
            flat[name] = flat[name][0]
    if model.layers_differ_in_size:  # with all keys, which Megatron Core needs
        flat |= {
            LAYERS_JSON: write_blocks(model.section(HeterogeneousConfig).sized_blocks),
            LAYERS_FILE: f"{LAYERS_JSON}.json",
        }
    if flat["step_batch_size_schedule"] is not None:
        flat["step_batch_size_schedule"] = " ".join(flat["step_batch_size_schedule"])
    if model.mamba_mixer == "gated_delta_product":
        flat["spec"] = ["megatron.core.models.hybrid.hybrid_layer_specs", "gdp_stack_spec"]
    return flat | {
        "add_bias_linear": model.add_bias_linear,
        "bias_gelu_fusion": gelu,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "max_position_embeddings": config.max_positions,
        "vocab_size": state["vocab_size"],
        "rope_type": "yarn" if model.section(PositionConfig).is_scaled_by("yarn") else "rope",
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
    return _TABLES["param_group"] | {
        "lr": adam.lr,
        "betas": (adam.adam_beta1, adam.adam_beta2),
        "eps": adam.adam_eps,
        "weight_decay": adam.weight_decay * decays,
        "step": steps,
        "is_expert_parallel": of_experts,
        "wd_mult": 1.0 if decays else 0.0,
        "max_lr": adam.lr,
        "min_lr": adam.min_lr,
    }


def _schedule(config: RunConfig, scheduled: int) -> dict[str, Any]:
    """The schedule of learning rate and weight decay, whose steps are sequences."""
    adam = config.optimizer
    training = config.training
    if config.schedules_by_samples:
        total = training.train_samples or 1
        batch = 1
        warmup = adam.lr_warmup_samples
        decay = adam.lr_decay_samples
    else:
        total = training.train_iters or 1
        batch = training.global_batch_size or 1
        warmup = adam.lr_warmup_iters
        decay = adam.lr_decay_iters
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
