"""A plan as a text file: one line of actions for each rank.

    # two ranks, two micro-batches; a # starts a comment
    stage_to_rank: round_robin
    0F0 0F1&0B0 0B1
    1F0 1B0 1F1 1B1

``0F1&0B0`` is a forward and a backward that run together. The line ``stage_to_rank:`` is optional and precedes the
ranks. Its value is ``round_robin`` (the default), ``v`` (rank r holds stages r and 2p - 1 - r) or the rank of each
stage in order, as in ``stage_to_rank: 0 1 1 0``.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_core.errors import LayoutError
from megatron_core.schedules.actions import Action, Plan, plan_of_turns, round_robin_stages, v_shaped_stages
from megatron_core.text_file import read_text

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file; ``LayoutError`` with file and line if it cannot be parsed."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise LayoutError(f"pipeline plan {path} cannot be read: {error}") from error
    return plan_from_text(lines, str(path))


def plan_from_text(lines: Iterable[str], name: str = "plan") -> Plan:
    """Parse a plan from lines of text; ``name`` is its name in error messages."""
    ranks: list[list[tuple[Action, ...]]] = []
    header = "round_robin"
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        try:
            if text.startswith("stage_to_rank:"):
                # Actions before the line would have been read under another placement.
                if ranks:
                    raise LayoutError("stage_to_rank: belongs before the first rank's line")
                header = text.removeprefix("stage_to_rank:").strip()
            elif text:
                ranks.append(list(map(parse_turn, text.split())))
        except LayoutError as error:
            raise LayoutError(f"{name}:{number}: {error}") from error
    if not ranks:
        raise LayoutError(f"{name} has no actions; write one line for each pipeline rank, such as 0F0 0F1 0B0 0B1")
    actions = [[action for turn in turns for action in turn] for turns in ranks]
    return plan_of_turns(ranks, _stage_to_rank(header, actions, name))


def parse_action(text: str) -> Action:
    """The inverse of ``str`` of an action; ``LayoutError`` if ``text`` is not an action."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise LayoutError(
            f"{text!r} is not a pipeline action; write STAGE, then F, B, I or W, then MICRO-BATCH, as in 2F0"
        )
    return Action(int(match[1]), match[2], int(match[3]))


def parse_turn(word: str) -> tuple[Action, ...]:
    """The inverse of ``format_turn``: an action, or a pair such as ``0F3&0B1``."""
    turn = tuple(map(parse_action, word.split("&")))
    if len(turn) > 1 and "".join(action.kind for action in turn) != "FB":
        raise LayoutError(f"{word!r} is not a pair; write a forward, &, then a backward (B) of another micro-batch")
    return turn


def _stage_to_rank(header: str, ranks: list[list[Action]], name: str) -> tuple[int, ...]:
    """Return the rank of each stage, from the value of the line ``stage_to_rank:``."""
    size = len(ranks)
    stages = 1 + max(action.stage for actions in ranks for action in actions)
    actions = sum(map(len, ranks))
    # Before anything of this size is allocated: a number in a file may be huge.
    if stages > actions:
        raise LayoutError(
            f"{name} has {actions} actions, but mentions stage {stages - 1}; stages are numbered from 0 without gaps"
        )
    if header == "v":
        return v_shaped_stages(size)
    if header == "round_robin":
        if stages % size:
            raise LayoutError(
                f"{name}: {stages} stages cannot be distributed round robin over {size} ranks; give each line equally "
                "many stages, or begin with stage_to_rank: v, or stage_to_rank: 0 1 ..."
            )
        return round_robin_stages(size, stages // size)
    words = header.split()
    if not words or not all(word.isdecimal() and int(word) < size for word in words):
        raise LayoutError(
            f"{name}: stage_to_rank: {header!r} is invalid; legal: round_robin, v, "
            f"or the rank (0 to {size - 1}) of each stage in turn"
        )
    return tuple(map(int, words))
