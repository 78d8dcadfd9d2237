"""Models of attention and state-space layers."""

from megatron.core.models.hybrid.hybrid_model import HybridModel
