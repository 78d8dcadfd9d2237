"""Forwards that run together with backwards of other micro-batches, while the messages of experts are in flight."""

from megatron_core.feature import Feature
from megatron_core.features.paired_passes.settings import SCHEDULES, PairedPassesConfig, pair_problems

PAIRED_PASSES = Feature(
    name="paired_passes",
    settings=PairedPassesConfig,
    is_used=lambda config: config.parallel.runs_in_pairs(config),
    problems=pair_problems,
    schedules=SCHEDULES,
    turns={"FB": "megatron_core.features.paired_passes.interleave:paired_turns"},
)
