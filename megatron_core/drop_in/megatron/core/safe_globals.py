"""Numpy arrays without pickled objects."""

from typing import Any

import numpy as np


def safe_numpy_load(file: Any) -> np.ndarray:
    """Load the array of a ``.npy`` file; ValueError for Python objects."""
    return np.load(file, allow_pickle=False)
