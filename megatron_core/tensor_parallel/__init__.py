"""Layers split over the tensor-parallel ranks.

Names are imported on first use, because few programs need all of them; ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
