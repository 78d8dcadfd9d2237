"""Check that a model gives the same results in every layout as in one process.

Names are imported on first use, because commands that only choose layouts do not need torch; ``__init__.pyi`` lists
them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
