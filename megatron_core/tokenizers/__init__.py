"""Tokenizers with one small protocol; this package does not import torch.

Names are imported on first use, because each kind of tokenizer loads another library; ``__init__.pyi`` lists them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
