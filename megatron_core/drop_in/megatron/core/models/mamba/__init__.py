"""The name of ``HybridModel`` in earlier releases."""

from megatron.core.models.hybrid.hybrid_model import MambaModel
