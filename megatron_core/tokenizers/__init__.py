"""Tokenizers with one small protocol; this package does not import torch.

Names are imported on first use; ``__init__.pyi`` lists them. Tokenizers with files are in ``vocabularies``.
"""

from typing import TYPE_CHECKING

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

if not TYPE_CHECKING:
    from megatron_core.moved import old_names_of

    __getattr__ = old_names_of(__name__, __getattr__)
