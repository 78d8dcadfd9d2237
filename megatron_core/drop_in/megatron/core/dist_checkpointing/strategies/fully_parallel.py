"""Shares of data-parallel ranks in saving and loading, which every rank has here."""

from typing import Any


def FullyParallelSaveStrategyWrapper(strategy: Any, parallelization_group: Any = None, *unused: Any) -> Any:
    """``strategy``."""
    return strategy


FullyParallelLoadStrategyWrapper = FullyParallelSaveStrategyWrapper
