"""Rules for memory: recompute, ZeRO, offload and compressed gradients."""

from collections.abc import Iterator
from typing import get_args

from megatron_core.config.layer_settings import RecomputeModule
from megatron_core.config.parallel import SHARDING_STRATEGIES, UNCOMPRESSED, compression_kinds
from megatron_core.config.rule_helpers import divisors, exclusive, leaves_rest
from megatron_core.config.run import RunConfig

RECOMPUTABLE: tuple[str, ...] = get_args(RecomputeModule)
"""Parts of a layer for selective recompute."""


def recompute_problems(config: RunConfig) -> Iterator[str]:
    """Incomplete or contradictory settings of recompute and activation offload."""
    model = config.model
    modules = ", ".join(model.recompute_modules)
    for name, choice in (
        ("recompute_method", "uniform or block"),
        ("recompute_num_layers", f"1 to {model.num_layers}"),
    ):
        if model.recompute_granularity == "full" and getattr(model, name) is None:
            yield f"{name}=None is missing for recompute_granularity=full; legal: {choice}"
    if not model.recompute_modules:
        yield f"recompute_modules=() is empty; give one or more of {', '.join(RECOMPUTABLE)}"
    if model.cpu_offloading_num_layers and any(map(model.recomputes, ("layernorm", "mla_up_proj", "moe_act"))):
        yield (
            f"cpu_offloading_num_layers={model.cpu_offloading_num_layers} offloads activations that "
            f"recompute_modules={modules} discards; remove one of them"
        )
    if model.cpu_offloading and model.cpu_offloading_num_layers == 0:
        yield "cpu_offloading=True and cpu_offloading_num_layers=0 offload nothing; give --cpu-offloading-num-layers"
    if (model.recompute_num_layers or 0) > model.num_layers >= 1:
        yield (
            f"recompute_num_layers={model.recompute_num_layers} is more than num_layers={model.num_layers}; "
            f"legal: 1 to {model.num_layers}"
        )


def sharding_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of ZeRO, offload and compression that contradict each other."""
    yield from _stage_problems(config, world_size)
    legal = *UNCOMPRESSED, *compression_kinds()
    if config.parallel.grad_compression not in legal:
        yield f"grad_compression={config.parallel.grad_compression} is unknown; legal: {', '.join(legal)}"
    yield from _offload_problems(config)
    yield from _storage_problems(config)


def _stage_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel, strategy = config.parallel, config.parallel.data_parallel_sharding_strategy
    if strategy is not None and SHARDING_STRATEGIES.index(strategy) != parallel.dp_zero_stage:
        yield exclusive(f"data_parallel_sharding_strategy={strategy}", f"zero_stage={parallel.zero_stage}")
    instances = parallel.num_distributed_optimizer_instances
    for what, size in (
        ("data-parallel", world_size // max(parallel.model_parallel_size, 1) * parallel.context_parallel_size),
        ("expert", world_size // max(parallel.expert_model_size, 1)),
    ):
        if instances >= 1 and leaves_rest(size, instances):
            yield (
                f"num_distributed_optimizer_instances={instances} cannot split {size} {what} copies; "
                f"legal: {', '.join(map(str, divisors(size)))}"
            )
            return
    if parallel.dp_zero_stage == 0 and parallel.use_distributed_optimizer:
        yield exclusive("zero_stage=0", "use_distributed_optimizer=True (zero_stage=1)")


def _offload_problems(config: RunConfig) -> Iterator[str]:
    parallel, optimizer = config.parallel, config.optimizer
    if parallel.zero3_param_cpu_offload and parallel.zero3_param_offload_dir is not None:
        yield (
            f"zero3_param_cpu_offload=True and zero3_param_offload_dir={parallel.zero3_param_offload_dir!r} are two "
            "places for the weights; remove one of them"
        )
    if parallel.zero3_param_offload_dir is not None and not optimizer.offloads_optimizer:
        yield (
            f"zero3_param_offload_dir={parallel.zero3_param_offload_dir!r} offloads weights, but not the "
            "larger optimizer state; add --optimizer-offload-dir or --optimizer-cpu-offload"
        )


def _storage_problems(config: RunConfig) -> Iterator[str]:
    """Offloaded state with state of matrices."""
    optimizer = config.optimizer
    if optimizer.has_matrix_state and optimizer.offloads_optimizer:
        yield (
            f"optimizer={optimizer.optimizer} has state of whole matrices, which must be on the device; "
            "remove --optimizer-cpu-offload and --optimizer-offload-dir"
        )
