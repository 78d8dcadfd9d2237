"""The defects that the parity matrix must detect: each occurred in practice without an error."""

from __future__ import annotations

from tests.defects.in_adapters import IN_ADAPTERS
from tests.defects.in_context import IN_CONTEXT
from tests.defects.in_experts import IN_EXPERTS
from tests.defects.in_fp8 import IN_FP8
from tests.defects.in_hub import IN_HUB
from tests.defects.in_latents import IN_LATENTS
from tests.defects.in_layers import IN_LAYERS
from tests.defects.in_outer import IN_OUTER
from tests.defects.in_recurrences import IN_RECURRENCES
from tests.defects.in_sinks import IN_SINKS
from tests.defects.in_sizes import IN_SIZES
from tests.defects.in_sparse_attention import IN_SPARSE_ATTENTION
from tests.defects.in_stability import IN_STABILITY
from tests.defects.in_steps import IN_STEPS
from tests.defects.in_zero import IN_ZERO

DEFECTS = (
    *IN_LAYERS,
    *IN_STEPS,
    *IN_ZERO,
    *IN_EXPERTS,
    *IN_CONTEXT,
    *IN_LATENTS,
    *IN_FP8,
    *IN_ADAPTERS,
    *IN_SINKS,
    *IN_SIZES,
    *IN_RECURRENCES,
    *IN_SPARSE_ATTENTION,
    *IN_HUB,
    *IN_STABILITY,
    *IN_OUTER,
)
