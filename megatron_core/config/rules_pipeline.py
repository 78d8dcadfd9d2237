"""Rules for pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_core.config.rules_stages import stage_problems
from megatron_core.config.run import RunConfig
from megatron_core.schedules import SCHEDULES, TRAINING


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """A schedule that does not allow the number of chunks, or is given together with a custom plan."""
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    if schedule is None or config.model.num_layers < 1 or parallel.pipeline_model_parallel_size < 1:
        return
    if any(stage_problems(config)):
        return  # the number of chunks is unknown
    if parallel.pipeline_plan is not None:
        yield (
            f"pipeline_schedule={schedule} and pipeline_plan={parallel.pipeline_plan} exclude one another; keep one "
            "of them"
        )
    wanted, chunks = SCHEDULES[schedule].chunks, parallel.num_chunks(config.model.num_layers)
    if wanted is None and chunks == 1:
        yield (
            f"pipeline_schedule={schedule} with one chunk on each rank is 1f1b; set "
            "num_virtual_stages_per_pipeline_rank to 2 or more, or choose 1f1b"
        )
    elif wanted not in (None, 1) and parallel.pipeline_model_parallel_size == 1:
        yield (
            f"pipeline_schedule={schedule} has {wanted} chunks on each of several pipeline ranks, but there is one "
            "rank; remove it or raise pipeline_model_parallel_size to 2 or more"
        )
    elif wanted == chunks == 2 and _has_counts(config):
        yield (
            f"pipeline_schedule={schedule} has the first and the last stage on the first rank, so that "
            "decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers do not apply; use "
            "pipeline_model_parallel_layout instead"
        )
    elif wanted not in (None, chunks):
        others = ", ".join(name for name in TRAINING if SCHEDULES[name].chunks in (None, chunks))
        yield (
            f"pipeline_schedule={schedule} cannot have {chunks} chunks on each rank; legal: {wanted} (with {chunks} "
            f"chunks: {others})"
        )


def _has_counts(config: RunConfig) -> bool:
    parallel = config.parallel
    return (parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers) != (None, None)
