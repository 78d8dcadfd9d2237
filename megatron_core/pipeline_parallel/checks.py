"""The proof of a plan before it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_core.errors import LayoutError
from megatron_core.pipeline_parallel.actions import Action, Plan


def problems(plan: Plan, num_microbatches: int, *, forward_only: bool = False) -> Iterator[str]:
    """All that is wrong with a plan, in sentences; nothing if every action is there once and none waits forever."""
    kinds = "F" if forward_only else "FB"
    wanted = {
        Action(stage, kind, micro)
        for stage in range(plan.num_stages)
        for kind in kinds
        for micro in range(num_microbatches)
    }
    seen = Counter(action for actions in plan.ranks for action in actions)
    yield from (f"{action} is missing" for action in sorted(wanted - set(seen)))
    yield from (f"{action} is not part of this step" for action in sorted(set(seen) - wanted))
    yield from (f"{action} is there {count} times" for action, count in sorted(seen.items()) if count > 1)
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            if action.stage < plan.num_stages and plan.place[action.stage] != rank:
                yield f"{action} is on rank {rank}, but stage {action.stage} is on rank {plan.place[action.stage]}"
    yield from _stuck(plan)


def check(plan: Plan, num_microbatches: int, *, forward_only: bool = False) -> Plan:
    """Return ``plan`` if it is sound; ``LayoutError`` with every problem otherwise."""
    found = list(problems(plan, num_microbatches, forward_only=forward_only))
    if found:
        raise LayoutError("this pipeline plan cannot run:\n" + "\n".join(f"  - {sentence}" for sentence in found))
    return plan


def _stuck(plan: Plan) -> Iterator[str]:
    """Run the plan with all costs zero; name what each rank waits for when nothing can go on."""
    done: set[Action] = set()
    position = [0] * len(plan.ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(plan.ranks):
            while position[rank] < len(actions) and _ready(plan, actions[position[rank]], done):
                done.add(actions[position[rank]])
                position[rank] += 1
                progress = True
    for rank, actions in enumerate(plan.ranks):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            missing = next(need for need in _needs(plan, action) if need not in done)
            yield f"rank {rank} waits forever before {action}, which needs {missing}"


def _ready(plan: Plan, action: Action, done: set[Action]) -> bool:
    return all(need in done for need in _needs(plan, action))


def _needs(plan: Plan, action: Action) -> list[Action]:
    """What has to be done before ``action``: its own forward, and the action whose output it consumes."""
    source = plan.source(action)
    forward = [Action(action.stage, "F", action.micro)] if action.kind == "B" else []
    return forward + ([source] if source is not None else [])
