"""Numbers of requests, masks, and whether an engine generates."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor


class InferenceMode:
    """Whether an engine generates in this process."""

    _active: ClassVar[bool] = False

    @classmethod
    def is_active(cls) -> bool:
        """Return whether an engine generates."""
        return cls._active

    @classmethod
    def set_active(cls) -> None:
        """Record that an engine generates."""
        cls._active = True

    @classmethod
    def unset_active(cls) -> None:
        """Record that no engine generates."""
        cls._active = False

    @classmethod
    @contextmanager
    def active(cls) -> Iterator[None]:
        """A context in which an engine generates."""
        before, cls._active = cls._active, True
        try:
            yield
        finally:
            cls._active = before


class Counter:
    """Iterator of the numbers of requests."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        """Continue with 0."""
        self.counter = 0


def get_attention_mask(seq_length: int) -> Tensor:
    """Return a causal mask ``[1, 1, s, s]``, True where a query must not see a key."""
    return torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool).triu(1)
