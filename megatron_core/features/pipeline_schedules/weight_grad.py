"""Split backwards: I computes the gradient of a stage's input, W later the deferred gradients of its weights."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from megatron_core.pipeline_parallel.executor import Executor, RunTurn
from megatron_core.pipeline_parallel.messages import Message
from megatron_core.schedules.actions import Action

Key = tuple[int, int]
"""Stage and micro-batch."""
Job = Callable[[], torch.Tensor | None]
"""Computes the gradient of a weight; None if it is added to ``main_grad``."""


class WeightGradQueue:
    """Stores the deferred work of W between a stage's I and its W.

    While parameters are ``attached``, the backward of a parallel linear layer passes the computation of the weight
    gradient to its weight's ``grad_queue``, which inside ``collecting`` stores it. The queue is an attribute of the
    weights, not a global, so that it is also available in autograd's threads and in a recomputed forward.
    """

    def __init__(self) -> None:
        self._jobs: dict[Key, list[tuple[nn.Parameter, Job]]] = {}
        self._key: Key | None = None

    @contextmanager
    def attached(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Set the attribute ``grad_queue`` of ``parameters`` inside the context."""
        weights: list[Any] = list(parameters)
        for weight in weights:
            weight.grad_queue = self
        try:
            yield
        finally:
            for weight in weights:
                del weight.grad_queue

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

    def takes(self, weight: nn.Parameter, job: Job) -> bool:
        """Store the computation of a weight's gradient if gradients are currently deferred; whether they are."""
        if self._key is not None:
            self._jobs[self._key].append((weight, job))
        return self._key is not None

    @torch.no_grad()  # autograd does not record inside a backward, but would record here
    def run(self, stage: int, micro: int) -> None:
        """Run the deferred jobs of a stage and micro-batch."""
        jobs = self._jobs.pop((stage, micro))
        while jobs:  # popping a job frees the tensors it holds
            weight, job = jobs.pop(0)
            grad = job()
            if grad is not None:  # not added to ``main_grad``
                # Not in place: autograd's own first gradient may share memory with another tensor.
                weight.grad = grad if weight.grad is None else weight.grad + grad


@contextmanager
def split_backward(executor: Executor) -> Iterator[RunTurn]:
    """Yields a function that runs an I, which returns the gradient of the stage's input, or a W."""
    queue = WeightGradQueue()

    def run(turn: tuple[Action, ...], received: tuple[Message | None, ...]) -> tuple[Message | None]:
        (action,) = turn
        if action.kind == "I":
            with queue.collecting(action.stage, action.micro):
                return (executor.backward(action, *received),)
        queue.run(action.stage, action.micro)
        if executor.is_last(action):
            executor.listener.on_last_weights(action.stage)
        return (None,)

    has_weights = any(action.kind == "W" for action in executor.actions)
    with queue.attached(executor.parameters if has_weights else ()):
        yield run
