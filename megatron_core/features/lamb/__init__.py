"""LAMB: Adam with steps in proportion to the norm of each tensor."""

from megatron_core.feature import Feature
from megatron_core.features.lamb.settings import ROW, LAMBConfig, lamb_problems, uses_lamb

LAMB = Feature(
    name="lamb",
    settings=LAMBConfig,
    is_used=uses_lamb,
    problems=lamb_problems,
    optimizers=(ROW,),
    in_any_model=True,
)
