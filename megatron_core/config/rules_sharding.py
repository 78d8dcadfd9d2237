"""Rules for ZeRO, offload and compressed gradients."""

from collections.abc import Iterator

from megatron_core.config.parallel import SHARDING_STRATEGIES
from megatron_core.config.rules_parallel import divisors, leaves_rest
from megatron_core.config.rules_ranges import exclusive, unused
from megatron_core.config.run import RunConfig


def sharding_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings of ZeRO, offload and compression that contradict each other."""
    yield from _stage_problems(config, world_size)
    yield from _compression_problems(config)
    yield from _offload_problems(config)
    yield from _storage_problems(config)


def _stage_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    parallel, strategy = config.parallel, config.parallel.data_parallel_sharding_strategy
    if strategy not in (None, *SHARDING_STRATEGIES):
        yield f"data_parallel_sharding_strategy={strategy} is unknown; legal: {', '.join(SHARDING_STRATEGIES)}"
        return
    if parallel.overlap_param_gather and parallel.dp_zero_stage == 0:
        yield (
            "overlap_param_gather=True needs sharded weights; "
            "add --use-distributed-optimizer (--zero-stage 1) or remove --overlap-param-gather"
        )
    if parallel.zero_stage not in (None, 0, 1, 2, 3):
        yield f"zero_stage={parallel.zero_stage} is out of range; legal: 0, 1, 2, 3"
    if strategy is not None and SHARDING_STRATEGIES.index(strategy) != parallel.dp_zero_stage:
        yield exclusive(f"data_parallel_sharding_strategy={strategy}", f"zero_stage={parallel.zero_stage}")
    if parallel.zero3_keep_after_forward and parallel.dp_zero_stage != 3:
        way_out = "add --zero-stage 3 or remove it"
        yield unused("zero3_keep_after_forward", True, "zero_stage", parallel.dp_zero_stage, way_out)
    instances = parallel.num_distributed_optimizer_instances
    if instances > 1 and parallel.dp_zero_stage == 0:
        way_out = "add --zero-stage 1, 2 or 3, or remove it"
        yield unused("num_distributed_optimizer_instances", instances, "zero_stage", 0, way_out)
    for what, size in (
        ("data-parallel", _data_ranks(config, world_size)),
        ("expert", _expert_copies(config, world_size)),
    ):
        if instances >= 1 and leaves_rest(size, instances):
            yield (
                f"num_distributed_optimizer_instances={instances} cannot split {size} {what} copies; "
                f"legal: {', '.join(map(str, divisors(size)))}"
            )
            return
    if parallel.dp_zero_stage == 0 and parallel.use_distributed_optimizer:
        yield exclusive("zero_stage=0", "use_distributed_optimizer=True (zero_stage=1)")


def _compression_problems(config: RunConfig) -> Iterator[str]:
    """Lossy sums need whole gradients on every rank; signs of momenta are Adam's and know no clipping."""
    parallel, optimizer, kind = config.parallel, config.optimizer, config.parallel.grad_compression
    if kind in ("powersgd", "onebit-adam") and parallel.dp_zero_stage > 0:
        yield (
            f"grad_compression={kind} sums whole gradients on every rank, but zero_stage={parallel.dp_zero_stage} "
            "shards them; use --zero-stage 0, or --grad-compression bf16"
        )
    if kind == "onebit-adam" and optimizer.optimizer != "adam":
        yield f"grad_compression=onebit-adam is Adam's, but optimizer={optimizer.optimizer}; use --optimizer adam"
    if kind == "onebit-adam" and (optimizer.clip_grad > 0 or optimizer.clip_grad_value > 0):
        yield (
            f"grad_compression=onebit-adam sums momenta, which clipping (clip_grad={optimizer.clip_grad}, "
            f"clip_grad_value={optimizer.clip_grad_value}) would scale; use --clip-grad 0 --clip-grad-value 0"
        )
    if kind == "onebit-adam" and (optimizer.offloads_optimizer or config.training.fp16):
        yield "grad_compression=onebit-adam needs Adam's state beside the weights and no loss scale; use --bf16"


def _offload_problems(config: RunConfig) -> Iterator[str]:
    parallel, optimizer = config.parallel, config.optimizer
    if optimizer.optimizer_offload_fraction != 1.0 and not optimizer.offloads_optimizer:
        yield (
            f"optimizer_offload_fraction={optimizer.optimizer_offload_fraction} has no effect without an offload; add "
            "--optimizer-cpu-offload or --optimizer-offload-dir"
        )
    if parallel.zero3_param_offload_dir is not None and parallel.dp_zero_stage != 3:
        folder, way_out = repr(parallel.zero3_param_offload_dir), "add --zero-stage 3 or remove it"
        yield unused("zero3_param_offload_dir", folder, "zero_stage", parallel.dp_zero_stage, way_out)
    if parallel.zero3_param_offload_dir is not None and not optimizer.offloads_optimizer:
        yield (
            f"zero3_param_offload_dir={parallel.zero3_param_offload_dir!r} moves weights, which are less than "
            "the optimizer's state; add --optimizer-offload-dir or --optimizer-cpu-offload"
        )


def _storage_problems(config: RunConfig) -> Iterator[str]:
    """What is stored in bfloat16 is so beside weights of 16 bits, on request."""
    optimizer = config.optimizer
    for name, value in optimizer.bf16_settings.items():
        if not optimizer.use_precision_aware_optimizer:
            yield f"{name}={value} needs --use-precision-aware-optimizer; add it, or use {name}=fp32"
        elif not config.training.bf16:
            yield f"{name}={value} goes with weights in bfloat16; add --bf16, or use {name}=fp32"
    if optimizer.bf16_settings and config.parallel.grad_compression == "onebit-adam":
        yield "grad_compression=onebit-adam sums moments in float32; use fp32 for exp_avg_dtype and exp_avg_sq_dtype"


def _data_ranks(config: RunConfig, world_size: int) -> int:
    """Ranks over which a dense parameter is sharded: data times context parallel."""
    return world_size // max(config.parallel.model_parallel_size, 1) * config.parallel.context_parallel_size


def _expert_copies(config: RunConfig, world_size: int) -> int:
    return world_size // max(config.parallel.expert_model_size, 1)
