"""Generating text from a checkpoint.

Names are imported on first use, because the flags of a command do not need torch; ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
