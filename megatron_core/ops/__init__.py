"""Fused operations: the native kernels of csrc as torch operators, and a reference in PyTorch for each.

Names are imported on first use; ``__init__.pyi`` lists them.
"""

from typing import TYPE_CHECKING

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

if not TYPE_CHECKING:
    from megatron_core.moved import old_names_of

    __getattr__ = old_names_of(__name__, __getattr__)
