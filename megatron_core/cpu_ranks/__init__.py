"""Ranks on CPUs: shared memory between the ranks of a machine, and worlds whose ranks are threads of a process."""

from megatron_core.feature import Feature

FEATURES = (
    Feature(
        name="cpu_ranks",
        is_used=lambda config: config.parallel.distributed_backend in ("auto", "shm"),
        transports={"shm": "megatron_core.cpu_ranks.shared_memory.backend"},
    ),
)
