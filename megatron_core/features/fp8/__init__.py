"""Matrix products of linear layers in FP8 (``--fp8-format``)."""

from megatron_core.feature import Feature
from megatron_core.features.fp8.rules import describe_fp8, fp8_problems, uses_fp8
from megatron_core.features.fp8.settings import FP8Config

FP8 = Feature(
    name="fp8",
    settings=FP8Config,
    is_used=uses_fp8,
    problems=fp8_problems,
    describe=describe_fp8,
    arithmetic="megatron_core.features.fp8.arithmetic:fp8_arithmetic",
    change_stage="megatron_core.features.fp8.arithmetic:mark_gathered_weights",
    run_part="megatron_core.features.fp8.part:FP8Part",
    callbacks=("megatron_core.features.fp8.part:FP8Statistics",),
)
