"""Context parallelism of each document over as many ranks as its length needs, Megatron-LM's hybrid one."""

from megatron_core.feature import Feature
from megatron_core.features.dynamic_context_parallelism.rules import describe_division, division_problems
from megatron_core.features.dynamic_context_parallelism.settings import DynamicContextConfig, divides_documents

DYNAMIC_CONTEXT_PARALLELISM = Feature(
    name="dynamic_context_parallelism",
    settings=DynamicContextConfig,
    is_used=divides_documents,
    problems=division_problems,
    describe=describe_division,
    change_stage="megatron_core.features.dynamic_context_parallelism.attention:replace_attention",
    run_part="megatron_core.features.dynamic_context_parallelism.part:DividedDocuments",
)
