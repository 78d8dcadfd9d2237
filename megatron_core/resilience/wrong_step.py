"""The error of checks during training."""

from collections.abc import Sequence

from megatron_core.errors import MegatronError


class WrongStepError(MegatronError):
    """Wrong values arrived or were computed; the state before step ``first`` is right, or no known one if it is 0."""

    def __init__(self, message: str, first: int, ranks: Sequence[int] = ()) -> None:
        """``ranks``: launcher ranks that must not continue."""
        super().__init__(message)
        self.first = first
        self.ranks = tuple(ranks)
