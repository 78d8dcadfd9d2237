"""Arrays of numpy without pickled objects."""

from typing import Any

import numpy as np


def safe_numpy_load(file: Any) -> np.ndarray:
    """The array of a ``.npy`` file; ValueError for one that holds Python objects."""
    return np.load(file, allow_pickle=False)
