"""The pipeline plan of a run."""

from __future__ import annotations

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.schedules import make_plan
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.checks import check
from megatron_core.schedules.plan_file import read_plan

CHUNKS = "num_virtual_stages_per_pipeline_rank"


def plan_of(config: RunConfig, num_microbatches: int) -> Plan:
    """The checked plan of ``config`` for ``num_microbatches`` on each rank; ``ConfigError`` if sizes differ."""
    parallel, layers = config.parallel, config.model.num_layers
    sizes = (parallel.pipeline_model_parallel_size, parallel.num_chunks(layers), num_microbatches)
    if parallel.pipeline_plan is None:
        return check(make_plan(parallel.schedule(layers), *sizes), num_microbatches)
    plan = read_plan(parallel.pipeline_plan)
    found = (len(plan.ranks), plan.num_chunks, plan.num_microbatches)
    settings = ("pipeline_model_parallel_size", CHUNKS, "micro-batches of a rank")
    for setting, ours, theirs in zip(settings, sizes, found, strict=True):
        taken_from_plan = setting == CHUNKS and parallel.num_virtual_stages_per_pipeline_rank is None
        if ours != theirs and not taken_from_plan:
            raise ConfigError(
                f"pipeline_plan={parallel.pipeline_plan} is a plan for {setting}={theirs}, but the run has {ours}; "
                "change one of them (micro-batches: global_batch_size / (micro_batch_size x data-parallel size))"
            )
    return check(plan, num_microbatches)
