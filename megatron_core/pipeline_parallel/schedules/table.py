"""The table of all schedules. To add one: a function that yields a plan, and a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_core.errors import ConfigError
from megatron_core.pipeline_parallel.actions import Plan
from megatron_core.pipeline_parallel.schedules.in_order import forward_only, gpipe, interleaved, one_f_one_b
from megatron_core.pipeline_parallel.schedules.v_shaped import dualpipe_v, zb_v
from megatron_core.pipeline_parallel.schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class Schedule:
    """A row of the table."""

    make: Callable[..., Plan]
    """``make(p, m)`` if ``chunks`` is a number, ``make(p, v, m)`` if any number of chunks will do."""
    chunks: int | None
    """Chunks that each rank must hold; None: any number."""
    splits_backward: bool
    """Whether some backwards are an I and a W."""
    source: str
    """Where it was published."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, 1, False, "Huang et al. 2019, GPipe"),
    "1f1b": Schedule(one_f_one_b, 1, False, "Narayanan et al. 2019, PipeDream; 2021, PipeDream-2BW"),
    "interleaved": Schedule(interleaved, None, False, "Narayanan et al. 2021, arXiv 2104.04473"),
    "zb_h1": Schedule(zb_h1, 1, True, "Qi et al. 2023, arXiv 2401.10241"),
    "zb_h2": Schedule(zb_h2, 1, True, "Qi et al. 2023, arXiv 2401.10241"),
    "zb_v": Schedule(zb_v, 2, True, "Qi et al. 2024, arXiv 2405.15362"),
    "dualpipe_v": Schedule(dualpipe_v, 2, True, "DeepSeek-AI 2024, arXiv 2412.19437; DualPipe's README"),
    "forward_only": Schedule(forward_only, None, False, "evaluation and generation"),
}


TRAINING = tuple(name for name in SCHEDULES if name != "forward_only")
"""Names of the schedules that train."""


def make_plan(name: str, num_ranks: int, num_chunks: int, num_microbatches: int) -> Plan:
    """The plan of the schedule ``name`` for p ranks with v chunks each and m micro-batches.

    ``ConfigError`` for a name that is not in the table, chunks that the schedule cannot have, or a size below 1.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline_schedule={name!r} is no schedule; legal: {', '.join(SCHEDULES)}")
    sizes = {"pipeline size": num_ranks, "chunks of a rank": num_chunks, "micro-batches": num_microbatches}
    for what, size in sizes.items():
        if size < 1:
            raise ConfigError(f"pipeline_schedule={name}: {what} = {size}; legal: 1 or more")
    schedule = SCHEDULES[name]
    if schedule.chunks is None:
        return schedule.make(num_ranks, num_chunks, num_microbatches)
    if num_chunks != schedule.chunks:
        fitting = [other for other, row in SCHEDULES.items() if row.chunks in (None, num_chunks)]
        raise ConfigError(
            f"pipeline_schedule={name} cannot have {num_chunks} chunks on each rank; legal: {schedule.chunks}. "
            f"With {num_chunks}: {', '.join(fitting)}"
        )
    return schedule.make(num_ranks, num_microbatches)
