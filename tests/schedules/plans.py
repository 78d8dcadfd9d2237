"""Plans as text, and back."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_core.features.pipeline_schedules.plan_file import parse_turn
from megatron_core.schedules.actions import (
    Plan,
    format_turn,
    plan_of_turns,
    round_robin_stages,
    v_shaped_stages,
)


def parse_plan(lines: Iterable[str], stage_to_rank: tuple[int, ...]) -> Plan:
    """Parse a plan from one line for each rank (``0F0 0F1&0B0 0B1``), which may be wrong."""
    return plan_of_turns(([parse_turn(word) for word in line.split()] for line in lines), stage_to_rank)


def format_plan(plan: Plan) -> str:
    """Return the text of a plan in the format of ``read_plan``."""
    size = len(plan.ranks)
    header = " ".join(map(str, plan.stage_to_rank))
    if plan.stage_to_rank == round_robin_stages(size, plan.num_chunks):
        header = "round_robin"
    elif plan.stage_to_rank == v_shaped_stages(size):
        header = "v"
    return "\n".join([f"stage_to_rank: {header}", *(" ".join(map(format_turn, turns)) for turns in plan.turns)]) + "\n"
