"""Attention over sequences that are split over several ranks (context parallelism), in tiles.

Names are imported on first use; ``__init__.pyi`` lists them.
"""

import lazy_loader

from megatron_core.feature import Feature
from megatron_core.features.context_parallelism.settings import ContextParallelConfig, context_problems

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

CONTEXT_PARALLELISM = Feature(
    name="context_parallelism",
    settings=ContextParallelConfig,
    is_used=lambda config: config.parallel.context_parallel_size > 1,
    problems=context_problems,
    layers={"tiled_attention": "megatron_core.features.context_parallelism.core_attention:tiled_attention"},
)
