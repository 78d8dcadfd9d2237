"""Rules of lossy gradient compression."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.features.compression.settings import KINDS, CompressionConfig, compresses


def compression_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """All kinds need one instance; sums of signs also their optimizer, with its state on the device in float32."""
    if not compresses(config):
        return
    parallel = config.parallel
    optimizer = config.optimizer
    name = parallel.grad_compression
    instances = parallel.num_distributed_optimizer_instances
    needed = next(row.optimizer for row in KINDS if row.name == name)
    settings = config.section(CompressionConfig)
    if instances > 1 and not name.startswith("int"):  # which store no errors
        yield (
            f"grad_compression={name} stores the errors of one sum over all data-parallel ranks, but "
            f"num_distributed_optimizer_instances={instances} adds a second sum; use "
            "--num-distributed-optimizer-instances 1, or --grad-compression bf16"
        )
    if name.endswith("int8-weights") and parallel.dp_zero_stage < 3:
        yield f"grad_compression={name} rounds the weights that ZeRO stage 3 gathers; use --zero-stage 3"
    if needed and optimizer.optimizer != needed:
        yield f"grad_compression={name} cannot be used with optimizer={optimizer.optimizer}; use --optimizer {needed}"
    if needed and optimizer.offloads_optimizer:
        yield (
            f"grad_compression={name} reads the optimizer's state in every backward, so the state must be on the "
            "device; remove --optimizer-cpu-offload and --optimizer-offload-dir, or use --grad-compression powersgd"
        )
    if name == "onebit-lamb" and settings.grad_compression_warmup_iters == 0:
        yield "grad_compression=onebit-lamb with grad_compression_warmup_iters=0; use 15 to 25 % of the training"
    if needed and optimizer.bf16_settings:
        yield f"grad_compression={name} needs exp_avg_dtype, exp_avg_sq_dtype and main_params_dtype fp32; set them"
    if settings.onebit_lamb_factor_min > settings.onebit_lamb_factor_max:
        yield (
            f"onebit_lamb_factor_min={settings.onebit_lamb_factor_min} is above "
            f"onebit_lamb_factor_max={settings.onebit_lamb_factor_max}; use a smaller --onebit-lamb-factor-min"
        )
    if name == "zero-one-adam":
        yield from _local_step_problems(config)


def _local_step_problems(config: RunConfig) -> Iterator[str]:
    """Settings with which the weights of data-parallel ranks may not differ during the local steps of 0/1 Adam."""
    parallel = config.parallel
    if parallel.dp_zero_stage:
        yield (
            "grad_compression=zero-one-adam lets the weights of ranks differ between synchronizations, but "
            f"zero_stage={parallel.dp_zero_stage} shards them; use --zero-stage 0 or --grad-compression onebit-adam"
        )
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        if getattr(parallel, name) > 1:
            yield (
                "grad_compression=zero-one-adam lets the weights of ranks differ between synchronizations, but with "
                f"{name}={getattr(parallel, name)} several of them compute one sample; use "
                f"--{name.replace('_', '-')} 1, or --grad-compression onebit-adam"
            )
