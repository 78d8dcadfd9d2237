"""Messages about a simulated world that cannot continue: the ranks by their axes, the module, the collective."""

import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from types import FrameType

from torch import nn

from megatron_core.cpu_ranks.simulated.meeting import in_short
from megatron_core.cpu_ranks.simulated.scheduler import Waiting
from megatron_core.parallel.current import current, has_current
from megatron_core.parallel.flight_recorder import LIBRARIES

SHOWN = 12
"""Number of different places that a report lists."""
EXAMPLES = 3
"""Number of ranks of each place whose operation is given."""


def name_of(rank: int, context: Context) -> str:
    """The rank and its indices on the axes, such as ``rank 37 [pp2 dp0 tp5]``."""
    # A copy, because the rank's own thread is inside the context.
    prefix = context.copy().run(lambda: current().prefix if has_current() else "")
    return f"rank {rank} {prefix}".rstrip()


@dataclass(frozen=True)
class Stuck:
    """A thread that waits, in a form that another process can read."""

    rank: int
    location: tuple[str, str]
    """Kind of the operation, and where the program calls it."""
    description: str
    """The rank and what it waits for."""
    awaited: list[int]
    """The ranks for which it waits."""


def stuck(waiting: Sequence[Waiting], contexts: Mapping[int, Context]) -> list[Stuck]:
    """Describe threads of this process that wait."""
    frames = sys._current_frames()
    return [
        Stuck(
            thread.rank,
            (thread.operation, place_of(frames[thread.thread])),
            f"{name_of(thread.rank, contexts[thread.rank])} waits {thread.describe()}",
            thread.awaited(),
        )
        for thread in waiting
    ]


def deadlock(waiting: Sequence[Stuck], ended: int) -> str:
    """Which ranks wait for what, and where; ``ended`` ranks have returned. The last line is the reason in one line."""
    places: dict[tuple[str, str], list[Stuck]] = {}
    for rank in waiting:
        places.setdefault(rank.location, []).append(rank)
    lines = []
    for (_, position), there in list(places.items())[:SHOWN]:
        lines.append(f"  {len(there)} rank{'s' * (len(there) > 1)} in {position or 'the interpreter'}:")
        lines += [f"    {rank.description}" for rank in there[:EXAMPLES]]
        if len(there) > EXAMPLES:
            lines.append(f"    and {in_short([rank.rank for rank in there[EXAMPLES:]])}")
    if len(places) > SHOWN:
        lines.append(f"  and {len(places) - SHOWN} other places")
    some_ended = f", and {ended} have ended" if ended else ""
    cause = " and ".join(f"{rank.description}, {rank.location[1]}" for rank in _circle(waiting)[:2])
    lines.append(f"deadlock: {len(waiting)} ranks wait for each other{some_ended}; {cause}")
    return "\n".join(lines)


def _circle(waiting: Sequence[Stuck]) -> list[Stuck]:
    """Ranks of which each waits for the next, and the last for the first; or one that waits for a rank that ended."""
    of_rank = {rank.rank: rank for rank in waiting}
    chain = [waiting[0]]
    while True:
        following = next((of_rank[rank] for rank in chain[-1].awaited if rank in of_rank), None)
        if following is None:
            return chain[-1:]
        if following in chain:
            return chain[chain.index(following) :]
        chain.append(following)


def failure(rank: int, error: BaseException, context: Context) -> str:
    """The traceback of ``error``, and the reason in one last line."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    text = str(error).strip().splitlines() or [""]
    where = _place(frames[::-1])
    return (
        f"{''.join(traceback.format_exception(error))}\n{name_of(rank, context)} failed, {where}: "
        f"{type(error).__name__}: {text[-1]}"
    )


def place_of(frame: FrameType | None) -> str:
    """The module and the line of the program that a thread executes."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _place(frames)


def _place(frames: Sequence[FrameType]) -> str:
    """Module, action of the pipeline, and line, from the innermost frame outwards."""
    words = []
    modules = [owner for frame in frames if isinstance(owner := frame.f_locals.get("self"), nn.Module)]
    if modules:
        words.append(f"module {_name_within(modules[0], modules[-1])}")
    action = next((frame.f_locals.get("action") for frame in frames if frame.f_code.co_name == "_run_action"), None)
    if action is not None:
        words.append(f"action {action}")
    caller = next((frame for frame in frames if not frame.f_code.co_filename.startswith((*LIBRARIES, "<"))), None)
    if caller is not None:
        words.append(f"{os.path.relpath(caller.f_code.co_filename)}:{caller.f_lineno} in {caller.f_code.co_name}")
    return ", ".join(words)


def _name_within(module: nn.Module, root: nn.Module) -> str:
    names: Iterator[str] = (name for name, child in root.named_modules() if child is module)
    class_name = type(module).__name__
    name = next(names, "")
    return f"{name} ({class_name})" if name else class_name
