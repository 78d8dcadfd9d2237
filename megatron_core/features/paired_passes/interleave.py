"""Interleave two functions: the messages of one are in flight while the other computes.

Only one of both runs at any time: after it has started a message, it hands over to the other, and it continues when the
other hands over, too, or ends.
"""

# The order of all operations depends neither on time nor on the rank, so that ranks call their collectives in the same
# order, and results have the same bits as if both ran one after the other.
# The second function has a thread of its own, because a backward pass cannot return to its caller in the middle. It
# begins, because the backward pass of a layer with experts begins with a message and its forward pass with attention:
# so each message of both is on its way while the other computes. On a GPU both use the stream of the caller.

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from megatron_core.features.experts.row_exchange import WHILE_ROWS_ARRIVE
from megatron_core.features.experts.row_exchange import hand_over as hand_over
from megatron_core.parallel.meter import METER
from megatron_core.parallel.rank_local import in_this_rank
from megatron_core.pipeline_parallel.executor import Executor, RunTurn
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
        except BaseException as error:  # raised again by ``interleave``, in the caller's thread
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


def interleave(
    pool: ThreadPoolExecutor, device: torch.device, first: Callable[[], A], second: Callable[[], B]
) -> tuple[A, B]:
    """Run both functions, beginning with ``second`` in a thread of ``pool``; return their results, or raise the first
    error of either."""
    pair = _Pair()
    # The device and the stream of this thread; a new thread has the defaults. Work of both functions in one stream is
    # ordered as the host calls it, so no events are needed between them.
    is_cuda = device.type == "cuda"
    stream: Any = torch.cuda.stream(torch.cuda.current_stream(device)) if is_cuda else nullcontext()

    def on_thread() -> B | None:
        with stream:
            return pair.run(1, second)

    WHILE_ROWS_ARRIVE().append(pair.hand_over)
    # The context of the calling thread holds the rank's state, such as its meter; a pool's thread does not inherit it.
    other = pool.submit(in_this_rank(on_thread))
    try:
        first_result: Any = pair.run(0, first)
        wait([other])
    finally:
        WHILE_ROWS_ARRIVE().remove(pair.hand_over)
    if pair.error is not None:
        raise pair.error
    second_result: Any = other.result()
    return first_result, second_result


@contextmanager
def paired_turns(executor: Executor) -> Iterator[RunTurn]:
    """Yields a function that runs the forward and the backward of a pair together."""
    with ThreadPoolExecutor(1, "interleaved") as pool:

        def run(turn: tuple[Action, ...], received: tuple[Message | None, ...]) -> tuple[Message | None, ...]:
            forward, backward = (partial(executor.run_action, *pair) for pair in zip(turn, received, strict=True))
            return interleave(pool, executor.message.device, forward, backward)

        yield run
