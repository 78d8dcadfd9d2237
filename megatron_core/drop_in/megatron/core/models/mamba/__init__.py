"""The name of ``HybridModel`` in older releases."""

from megatron.core.models.hybrid.hybrid_model import HybridModel as MambaModel
