"""Mixture of experts: a router chooses experts for each token; a dispatcher sends tokens to experts and back.

Names are imported on first use, because most layers are dense; ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
