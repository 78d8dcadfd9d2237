"""Maximal update parametrization: hyperparameters tuned on a narrow model suit a wide one."""

from megatron_core.feature import Feature
from megatron_core.features.mup.settings import MuPConfig, mup_problems

MUP = Feature(
    name="mup",
    settings=MuPConfig,
    is_used=lambda config: config.model.section(MuPConfig).use_mup,
    problems=mup_problems,
)
