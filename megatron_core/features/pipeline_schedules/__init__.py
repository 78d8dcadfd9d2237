"""Pipeline schedules other than 1F1B, and in files; backwards in two parts, for the input (I) and the weights (W)."""

from megatron_core.feature import Feature
from megatron_core.features.pipeline_schedules.settings import SCHEDULES, PlanFileConfig, plan_file_problems

PIPELINE_SCHEDULES = Feature(
    name="pipeline_schedules",
    settings=PlanFileConfig,
    is_used=lambda config: (
        bool(config.parallel.plan_name) or config.parallel.pipeline_schedule in {row.name for row in SCHEDULES}
    ),
    problems=plan_file_problems,
    schedules=SCHEDULES,
    turns=dict.fromkeys("IW", "megatron_core.features.pipeline_schedules.weight_grad:split_backward"),
)
