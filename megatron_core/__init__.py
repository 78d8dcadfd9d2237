"""Megatron's parallelism on plain PyTorch.

``initialize`` trains any ``nn.Module``, and ``parallelize`` splits it over tensor-parallel ranks (imported on first
use, because settings and tools need no torch); ``drop_in`` runs programs written for Megatron-LM or DeepSpeed.
"""

import lazy_loader

from megatron_core import moved

moved.install()

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
