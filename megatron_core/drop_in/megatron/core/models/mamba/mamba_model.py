"""State-space layers, which are not supported."""

from megatron.core.models.hybrid.hybrid_model import HybridModel as MambaModel
