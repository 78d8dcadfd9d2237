"""Rules for groups of replicas that exchange their weights every few steps (``outer_steps``)."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_core.config.rule_helpers import divisors, exclusive, leaves_rest
from megatron_core.config.run import RunConfig
from megatron_core.features.outer_steps.settings import OuterConfig


def outer_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Groups that do not fit the ranks, impossible schedules of exchanges, and settings that groups exclude."""
    outer = config.section(OuterConfig)
    parallel = config.parallel
    if outer.outer_steps < 1 or outer.outer_groups < 1:
        return
    copies = world_size // max(parallel.model_parallel_size, 1)
    experts = world_size // max(parallel.expert_model_size, 1)
    for what, size in (("data-parallel", copies), ("expert", experts)):
        if size >= 1 and (leaves_rest(size, outer.outer_groups) or outer.outer_groups > size):
            yield (
                f"outer_groups={outer.outer_groups} cannot split {size} {what} copies; legal: "
                f"{', '.join(map(str, divisors(size)))}"
            )
            break
    if outer.outer_fragments > min(outer.outer_steps, config.model.num_layers):
        yield (
            f"outer_fragments={outer.outer_fragments} needs as many steps between exchanges and as many layers; legal: "
            f"1 to {min(outer.outer_steps, config.model.num_layers)}"
        )
    if outer.outer_delay >= outer.outer_steps:
        yield (
            f"outer_delay={outer.outer_delay} is not less than outer_steps={outer.outer_steps}, so two exchanges "
            f"of a fragment would be in flight; legal: 0 to {outer.outer_steps - 1}"
        )
    name = f"outer_steps={outer.outer_steps}"
    for other in _excluded(config):
        yield exclusive(name, other)


def _excluded(config: RunConfig) -> Iterator[str]:
    """The settings of a run that do not work with groups."""
    parallel = config.parallel
    optimizer = config.optimizer
    if config.training.fp16:
        yield "fp16=True, whose loss scale would differ between groups; use --bf16"
    fp8_format = config.optional("fp8_format")
    if fp8_format is not None:
        yield f"fp8_format={fp8_format}, whose scales would differ between groups"
    if optimizer.ema_decay is not None:
        yield f"ema_decay={optimizer.ema_decay}; the global weights already are a mean"
    if optimizer.offloads_optimizer or parallel.offloads_weights:
        yield "offload of weights or optimizer state"
    if optimizer.has_matrix_state:
        yield f"optimizer={optimizer.optimizer}, whose state of whole matrices has not been tested with groups"
    if optimizer.bf16_settings:
        yield f"{', '.join(f'{key}={value}' for key, value in optimizer.bf16_settings.items())}"
    if parallel.grad_compression not in ("none", "bf16"):
        yield f"grad_compression={parallel.grad_compression}; use --outer-exchange"
    if parallel.num_distributed_optimizer_instances > 1:
        yield f"num_distributed_optimizer_instances={parallel.num_distributed_optimizer_instances}"
    if parallel.layout_invariant:
        yield "layout_invariant=True"
    if config.optional("moe_router_load_balancing_type") == "quantile_balancing":
        yield "moe_router_load_balancing_type=quantile_balancing, whose biases would differ between groups"
    if config.optional("moe_router_enable_expert_bias"):
        yield "moe_router_enable_expert_bias=True, whose biases would differ between groups"
    if (rank := config.optional("lora_rank")) is not None:
        yield f"lora_rank={rank}"
    if config.optional("elastic"):
        yield "elastic=True"
    if (mode := config.optional("rerun_mode")) not in (None, "disabled"):
        yield f"rerun_mode={mode}"
    if (interval := config.optional("replay_interval")) is not None:
        yield f"replay_interval={interval}"
    if config.optional("record_hashes"):
        yield "record_hashes=True"
    if config.checkpoint.ckpt_format != "native":
        yield f"ckpt_format={config.checkpoint.ckpt_format}"
    if (kind := config.checkpoint.non_persistent_ckpt_type) != "global":
        yield f"non_persistent_ckpt_type={kind}; use global"


def other_group_problems(stored: Mapping[str, Any], config: RunConfig, folder: Path) -> Iterator[str]:
    """A checkpoint with the state of another number of groups. Without groups, any number can start from it."""
    steps = stored.get("outer_steps", 0)
    stored_groups = stored.get("outer_groups", 1)
    outer = config.section(OuterConfig)
    groups = outer.outer_groups if outer.outer_steps else 0
    if steps and stored_groups != groups and not config.checkpoint.no_load_optim:
        setting = f"outer_groups={groups}" if groups else "outer_steps=0"
        yield (
            f"{setting}, but the checkpoint {folder} has the state of {stored_groups} groups; give --outer-steps "
            f"{steps} --outer-groups {stored_groups}, or start with its global weights and new optimizer state by "
            "--no-load-optim"
        )
