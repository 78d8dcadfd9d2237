"""Sections of profiling, the seed, and the start of torch.distributed."""

from dataclasses import dataclass, field

from megatron.core.mirror import mirror


@dataclass(kw_only=True)
class ProfilingConfig(mirror("ProfilingConfig", kw_only=True)):  # type: ignore[misc]
    """The profiled steps; either of the two switches enables --profile."""

    use_nsys_profiler: bool = field(default=False, metadata={"argparse_meta": {"arg_names": ["--profile"]}})


class RNGConfig(mirror("RNGConfig", kw_only=True)):  # type: ignore[misc]
    """The seed of initial weights, data order and dropout."""


class DistributedInitConfig(mirror("DistributedInitConfig", kw_only=True)):  # type: ignore[misc]
    """The start of torch.distributed."""
