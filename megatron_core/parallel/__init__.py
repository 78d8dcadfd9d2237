"""The layout: grid, process groups, collectives and shards of parameters.

Names are imported on first use, because ``parallel.grid`` must not import torch; ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
