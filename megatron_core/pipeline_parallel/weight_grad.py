"""Weight gradients that a split backward puts off: I computes the gradient of the input now, W that of the weights."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Key = tuple[int, int]
"""Stage and micro-batch."""


class WeightGradQueue:
    """Holds the work of W between a stage's I and its W.

    While parameters are ``attached``, the backward of a parallel linear layer asks its weight's ``grad_queue``: inside
    ``collecting`` it puts the weight gradient here instead of computing it. The queue is an attribute of the weights,
    not a global, so that it is found from autograd's threads and in a recomputed forward, too.
    """

    def __init__(self) -> None:
        self._jobs: dict[Key, list[Callable[[], None]]] = {}
        self._key: Key | None = None

    @contextmanager
    def attached(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Let ``parameters`` know of this queue."""
        parameters = list(parameters)
        for parameter in parameters:
            parameter.grad_queue = self
        try:
            yield
        finally:
            for parameter in parameters:
                del parameter.grad_queue

    @contextmanager
    def collecting(self, stage: int, micro: int) -> Iterator[None]:
        """Put off the weight gradients of the backward that runs inside."""
        self._key = (stage, micro)
        self._jobs.setdefault(self._key, [])
        try:
            yield
        finally:
            self._key = None

    @property
    def is_collecting(self) -> bool:
        """Whether weight gradients are to be put here now."""
        return self._key is not None

    def put(self, job: Callable[[], None]) -> None:
        """Keep ``job``, which adds a weight's gradient to where it belongs."""
        assert self._key is not None, "ask is_collecting first"
        self._jobs[self._key].append(job)

    @torch.no_grad()  # inside a backward autograd does not record, here it would
    def run(self, stage: int, micro: int) -> None:
        """Do what was put off for a stage and micro-batch."""
        jobs = self._jobs.pop((stage, micro))
        while jobs:  # what a job keeps alive goes with it
            jobs.pop(0)()
