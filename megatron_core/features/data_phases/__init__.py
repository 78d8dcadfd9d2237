"""Training data in phases: blends one after another."""

from megatron_core.feature import Feature
from megatron_core.features.data_phases.settings import DataPhasesConfig, phase_problems

DATA_PHASES = Feature(
    name="data_phases",
    settings=DataPhasesConfig,
    is_used=lambda config: config.data.phase_hooks != "",
    problems=phase_problems,
)
