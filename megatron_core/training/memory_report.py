"""Predicted and actual memory of this rank's training state."""

from megatron_core.monitor.memory import peak_memory_bytes
from megatron_core.planner import state_by_kind
from megatron_core.training.dry_run import readable_bytes
from megatron_core.training.setup import Run


def planned_bytes(run: Run) -> float:
    """Predicted bytes of weights, gradients and optimizer state; each bucket is sharded over its own group."""
    config = run.config
    return sum(
        sum(parameter.numel() for parameter in shard.bucket.parameters)
        * sum(
            state_by_kind(
                config.training.compute_dtype,
                shard.bucket.dp_group.size(),
                zero_stage=config.parallel.dp_zero_stage,
                optimizer=config.optimizer,
                hidden=shard.bucket.kind.is_hidden_matrix,
            ).values()
        )
        for shard in run.optimizer.shards
    )


def found_bytes(run: Run) -> dict[str, int]:
    """Bytes of this rank's weights, gradients and optimizer state, and of temporarily gathered units."""
    state = [tensor for _, named in run.optimizer.tensors() for tensor in named.values()]
    return run.data_parallel.resident_bytes() | {"optimizer": sum(tensor.nbytes for tensor in state)}


def describe_memory(run: Run, *, after_step: int = 0) -> str:
    """A line for the console: the prediction at the start; after a step, the actual bytes beside it."""
    found, plan = found_bytes(run), planned_bytes(run)
    parts = ", ".join(f"{kind} {readable_bytes(size)}" for kind, size in found.items())
    if not after_step:
        return f"memory of rank {run.groups.rank} by formula: {readable_bytes(plan)} of state; {parts}"
    state = sum(size for kind, size in found.items() if kind != "units whole")
    sent = sum(bucket.wire_bytes for bucket in run.data_parallel.buckets)
    gathered = sum(bucket.gathered_bytes for bucket in run.data_parallel.buckets)
    return (
        f"memory of rank {run.groups.rank} after step {after_step}: {readable_bytes(state)} of state, planned "
        f"{readable_bytes(plan)}; {parts}; peak {readable_bytes(peak_memory_bytes())}; gradients "
        f"sent {readable_bytes(sent)}, weights {readable_bytes(gathered)} so far"
    )
