"""Interleave two functions: the messages of one are in flight while the other computes.

Only one of both runs at any time: after it has started a message, it hands over to the other, and it continues when the
other hands over, too, or ends.
"""

# The order of all operations depends neither on time nor on the rank, so that ranks call their collectives in the same
# order, and results have the same bits as if both ran one after the other.
# The second function has a thread of its own, because a backward pass cannot return to its caller in the middle. It
# begins, because the backward pass of a layer with experts begins with a message and its forward pass with attention:
# so each message of both is on its way while the other computes. On a GPU both use the stream of the caller.

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from megatron_core.features.experts.row_exchange import WHILE_ROWS_ARRIVE
from megatron_core.features.experts.row_exchange import hand_over as hand_over
from megatron_core.parallel.meter import METER
from megatron_core.parallel.rank_local import in_this_rank
from megatron_core.pipeline_parallel.executor import AddedTurns, Executor
from megatron_core.pipeline_parallel.messages import Message
from megatron_core.schedules.actions import Action

A = TypeVar("A")
B = TypeVar("B")


class _AbandonedError(Exception):
    """The other function of the pair has failed."""


class _Pair:
    """The function that may run, 0 or 1."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turn = 1
        self._ended = [False, False]
        self.error: BaseException | None = None

    def hand_over(self) -> None:
        """Switch to the other function until it switches back or ends."""
        turn = self._turn
        # Nobody is left to hand over to; this function finishes alone.
        if self._ended[1 - turn]:
            return
        # The meter has one phase for both functions, so each restores its own after it was away.
        charged = METER.charged
        self._give(1 - turn)
        self._take(turn)
        METER.switch(*charged)

    def run(self, turn: int, function: Callable[[], A]) -> A | None:
        """Run a function in its turns; an error is stored in ``error``."""
        result = None
        try:
            self._take(turn)
            result = function()
        except _AbandonedError:
            pass
        # Also KeyboardInterrupt: a thread that dies without giving its turn back would block the other one forever.
        except BaseException as error:  # raised again by ``Interleaver.run``, in the caller's thread
            with self._changed:
                self.error = self.error or error
        self._ended[turn] = True
        self._give(1 - turn)
        return result

    def _give(self, to: int) -> None:
        with self._changed:
            self._turn = to
            self._changed.notify_all()

    def _take(self, turn: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == turn or self.error is not None)
        if self.error is not None:
            raise _AbandonedError


class Interleaver:
    """Runs pairs of functions; a context manager, which ends its thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = ThreadPoolExecutor(1, "interleaved")

    def __enter__(self) -> Interleaver:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    def run(self, first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
        """Run both functions, beginning with ``second``; return their results, or raise the first error of either."""
        pair = _Pair()
        stream = self._stream()

        def on_thread() -> B | None:
            with stream:
                return pair.run(1, second)

        WHILE_ROWS_ARRIVE().append(pair.hand_over)
        # The context of the calling thread holds the rank's state, such as its meter; a pool's thread does not inherit
        # it.
        other = self._pool.submit(in_this_rank(on_thread))
        try:
            first_result: Any = pair.run(0, first)
            wait([other])
        finally:
            WHILE_ROWS_ARRIVE().remove(pair.hand_over)
        if pair.error is not None:
            raise pair.error
        second_result: Any = other.result()
        return first_result, second_result

    def _stream(self) -> AbstractContextManager[Any]:
        """The device and the stream of the calling thread; a new thread has the defaults."""
        if self._device.type != "cuda":
            return nullcontext()
        # Work of both functions in one stream is ordered as the host calls it, so no events are needed between them.
        return torch.cuda.stream(torch.cuda.current_stream(self._device))


class PairedTurns(AddedTurns):
    """Runs the pairs of a plan: the forward and the backward of each together."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._interleaver = Interleaver(executor.message.device)

    def around_run(self) -> AbstractContextManager[object]:
        """The context of the second thread."""
        return self._interleaver

    def run(self, turn: tuple[Action, ...], received: tuple[Message | None, ...]) -> tuple[Message | None, ...]:
        """Run the actions of a pair together, and return the output of each."""
        forward, backward = (partial(self._executor.run_action, *pair) for pair in zip(turn, received, strict=True))
        return self._interleaver.run(forward, backward)
