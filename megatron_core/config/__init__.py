"""Frozen configuration: built once, checked once, then only read.

Names are imported on first use, so that a layer loads only the settings that it reads; ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
