"""Distillation: the model learns a frozen teacher's distribution of each token."""

from megatron_core.feature import Feature, Shorthand
from megatron_core.features.distillation.modelopt import distillation_settings
from megatron_core.features.distillation.rules import distillation_problems
from megatron_core.features.distillation.settings import DistillationConfig

DISTILLATION = Feature(
    name="distillation",
    settings=DistillationConfig,
    is_used=lambda config: config.section(DistillationConfig).kd_teacher is not None,
    problems=distillation_problems,
    shorthands={
        "export_kd_cfg": Shorthand(
            "YAML file of NVIDIA ModelOpt with the loss of --kd-teacher: it sets --kd-weight and --kd-temperature, "
            "and flags override it (docs/fine_tune.md).",
            lambda path, names: distillation_settings(path),
        )
    },
    objective="megatron_core.features.distillation.objective:Distillation",
)
