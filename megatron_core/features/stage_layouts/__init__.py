"""Pipelines whose layers the user assigns to stages, instead of stages that are balanced by cost."""

from megatron_core.feature import Feature
from megatron_core.features.stage_layouts.settings import ASSIGNING, StageLayoutConfig, stage_layout_problems

STAGE_LAYOUTS = Feature(
    name="stage_layouts",
    settings=StageLayoutConfig,
    is_used=lambda config: any(config.value(name) != usual for name, usual in ASSIGNING.items()),
    problems=stage_layout_problems,
)
