"""Fill in the middle (FIM): documents are rearranged so that a model learns to write a missing part (--fim-data)."""

from megatron_core.feature import Feature
from megatron_core.features.fill_in_the_middle.settings import (
    FillInTheMiddleConfig,
    rearrangement_problems,
    rearranges_documents,
)

FILL_IN_THE_MIDDLE = Feature(
    name="fill_in_the_middle",
    settings=FillInTheMiddleConfig,
    is_used=rearranges_documents,
    problems=rearrangement_problems,
    data_part="megatron_core.features.fill_in_the_middle.dataset:RearrangedData",
)
