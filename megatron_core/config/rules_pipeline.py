"""Rules for pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_core.config.parallel import V_SHAPED
from megatron_core.config.run import RunConfig


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """A schedule and the chunks that it cannot have; a schedule beside a plan of one's own."""
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    if schedule is None or config.model.num_layers < 1:
        return
    if parallel.pipeline_plan is not None:
        yield (
            f"pipeline_schedule={schedule} and pipeline_plan={parallel.pipeline_plan} exclude one another; keep one "
            "of them"
        )
    chunks = parallel.num_chunks(config.model.num_layers)
    if schedule in V_SHAPED and parallel.pipeline_model_parallel_size == 1:
        yield (
            f"pipeline_schedule={schedule} goes down the ranks of a pipeline and back, and this one has one rank; "
            "remove it or raise pipeline_model_parallel_size to 2 or more"
        )
    elif schedule in V_SHAPED and chunks != 2:
        yield (
            f"pipeline_schedule={schedule} holds 2 chunks on each rank, not {chunks}; remove "
            "num_virtual_stages_per_pipeline_rank and num_layers_per_virtual_pipeline_stage"
        )
    elif schedule == "interleaved" and chunks == 1:
        yield (
            "pipeline_schedule=interleaved with one chunk on each rank is 1f1b; set "
            "num_virtual_stages_per_pipeline_rank to 2 or more, or choose 1f1b"
        )
    elif schedule not in ("interleaved", *V_SHAPED) and chunks > 1:
        yield (
            f"pipeline_schedule={schedule} holds one chunk on each rank, not {chunks}; legal with {chunks} chunks: "
            "interleaved" + (", zb_v, dualpipe_v" if chunks == 2 else "")
        )
