"""Groups of replicas that train on their own and exchange their weights every few steps (DiLoCo)."""

from megatron_core.feature import Feature
from megatron_core.features.outer_steps.rules import other_group_problems, outer_problems
from megatron_core.features.outer_steps.settings import OuterConfig

OUTER_STEPS = Feature(
    name="outer_steps",
    settings=OuterConfig,
    is_used=lambda config: config.section(OuterConfig).outer_steps > 0 and not config.training.skip_train,
    problems=outer_problems,
    resume_problems=other_group_problems,
    run_part="megatron_core.features.outer_steps.part:OuterSteps",
)
