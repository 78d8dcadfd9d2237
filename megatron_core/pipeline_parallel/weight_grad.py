"""Deferred weight gradients of a split backward: I computes the gradient of the input, W later that of the weights."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

Key = tuple[int, int]
"""Stage and micro-batch."""


class WeightGradQueue:
    """Stores the deferred work of W between a stage's I and its W.

    While parameters are ``attached``, the backward of a parallel linear layer checks its weight's ``grad_queue``:
    inside ``collecting`` it puts the computation of the weight gradient here instead of running it. The queue is an
    attribute of the weights, not a global, so that it is also available in autograd's threads and in a recomputed
    forward.
    """

    def __init__(self) -> None:
        self._jobs: dict[Key, list[Callable[[], None]]] = {}
        self._key: Key | None = None

    @contextmanager
    def attached(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Set the attribute ``grad_queue`` of ``parameters`` inside the context."""
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
        """Defer the weight gradients of the backward that runs inside the context."""
        self._key = (stage, micro)
        # Also without jobs: W runs for stages whose layers defer nothing.
        self._jobs.setdefault(self._key, [])
        try:
            yield
        finally:
            self._key = None

    @property
    def is_collecting(self) -> bool:
        """Whether weight gradients are currently deferred."""
        return self._key is not None

    def put(self, job: Callable[[], None]) -> None:
        """Store ``job``, which computes a weight's gradient and accumulates it."""
        assert self._key is not None, "ask is_collecting first"
        self._jobs[self._key].append(job)

    @torch.no_grad()  # autograd does not record inside a backward, but would record here
    def run(self, stage: int, micro: int) -> None:
        """Run the deferred jobs of a stage and micro-batch."""
        jobs = self._jobs.pop((stage, micro))
        while jobs:  # popping a job frees the tensors it holds
            jobs.pop(0)()
