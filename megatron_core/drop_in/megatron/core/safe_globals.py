"""Numpy arrays without pickled objects; pickles are not read."""

from typing import Any

import numpy as np

from megatron_core.drop_in.unsupported import Unsupported


class SafeUnpickler(Unsupported):
    """Megatron's reader of pickled states of FP8."""

    message = "SafeUnpickler is not supported: this package reads no pickles outside of checkpoints of Megatron-LM"


def register_safe_globals() -> None:
    """Do nothing: checkpoints are read without Megatron's classes."""


def safe_numpy_load(path: Any, *, allow_pickle: bool = False, **settings: Any) -> Any:
    """Load a ``.npy`` or ``.npz`` file; ValueError for Python objects, also with ``allow_pickle``."""
    return np.load(path, **settings)
