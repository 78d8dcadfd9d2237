"""Parallel saving and loading over data-parallel ranks, which is always on here."""

from typing import Any


def FullyParallelSaveStrategyWrapper(strategy: Any, parallelization_group: Any = None, *unused: Any) -> Any:
    """Return ``strategy``."""
    return strategy


FullyParallelLoadStrategyWrapper = FullyParallelSaveStrategyWrapper
