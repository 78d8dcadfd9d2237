"""Check a plan before it runs: completeness, order, deadlock."""

from collections import Counter
from collections.abc import Iterator

from megatron_core.errors import LayoutError
from megatron_core.schedules.actions import Action, Plan, format_turn


def plan_problems(plan: Plan, num_microbatches: int, *, forward_only: bool = False) -> Iterator[str]:
    """Yield every problem of a plan as a sentence; nothing if the plan is valid.

    A valid plan has each F exactly once, and for every stage and micro-batch either one B or one I and one W. Each
    action is on the rank of its stage. A pair is a forward and a B. No rank waits forever for a dependency. Messages
    between two stages are received in the order of sending. Such a plan runs with blocking and with overlapped sends:
    see ``Plan.receive_lookahead``.
    """
    # All problems at once, as for a configuration: a plan of a user's own may have several.
    local_problems = [*_contents(plan, num_microbatches, forward_only), *_misplaced(plan), *_bad_pairs(plan)]
    yield from local_problems
    # Also for incomplete plans: the action that is missing is often what a rank waits for.
    yield from _stuck(plan)
    if not local_problems:  # senders and receivers of messages are defined only for a complete plan
        yield from order_problems(plan)


def check_plan(plan: Plan, num_microbatches: int, *, forward_only: bool = False) -> Plan:
    """Return ``plan`` if it is valid; otherwise ``LayoutError`` with every problem."""
    sentences = list(plan_problems(plan, num_microbatches, forward_only=forward_only))
    if sentences:
        raise LayoutError("this pipeline plan cannot run:\n" + "\n".join(f"  - {sentence}" for sentence in sentences))
    return plan


def _contents(plan: Plan, num_microbatches: int, forward_only: bool) -> Iterator[str]:
    """Yield actions that are missing, unknown or duplicated, and backwards that are both split and whole."""
    seen = Counter(action for actions in plan.ranks for action in actions)
    wanted: set[Action] = set()
    for stage in range(plan.num_stages):
        for micro in range(num_microbatches):
            kinds = "F" if forward_only else "F" + _backward_kinds(seen, stage, micro)
            wanted.update(Action(stage, action_kind, micro) for action_kind in kinds)
    yield from (f"{action} is missing" for action in sorted(wanted - set(seen)))
    for action in sorted(set(seen) - wanted):
        whole_backward = Action(action.stage, "B", action.micro)
        if action.kind in "IW" and whole_backward in wanted:
            yield f"the plan has both {action} and {whole_backward}; a backward is either B, or I and W"
        else:
            yield f"{action} is not part of this step"
    yield from (f"{action} occurs {count} times" for action, count in sorted(seen.items()) if count > 1)


def _backward_kinds(seen: Counter[Action], stage: int, micro: int) -> str:
    """Return B, or IW if the plan has an I or W and no B of this stage and micro-batch."""
    split = any(Action(stage, action_kind, micro) in seen for action_kind in "IW")
    return "IW" if split and Action(stage, "B", micro) not in seen else "B"


def _misplaced(plan: Plan) -> Iterator[str]:
    for stage, rank in enumerate(plan.stage_to_rank):
        if not 0 <= rank < len(plan.ranks):
            yield f"stage {stage} is on rank {rank}, but the plan has ranks 0 to {len(plan.ranks) - 1}"
    for rank, actions in enumerate(plan.ranks):
        for action in actions:
            right = plan.stage_to_rank[action.stage] if action.stage < plan.num_stages else rank
            if right != rank:
                yield f"{action} is on rank {rank}, but stage {action.stage} is on rank {right}"


def _stuck(plan: Plan) -> Iterator[str]:
    """Walk through the plan; in a deadlock yield the action each rank waits for."""
    done = {action for _, turn in plan.walk() for action in turn}
    for rank, turns in enumerate(plan.turns):
        turn = next((turn for turn in turns if turn[0] not in done), None)
        if turn is not None:
            yield f"rank {rank} waits forever before {format_turn(turn)}, which needs {plan.missing(turn, done)}"


def _bad_pairs(plan: Plan) -> Iterator[str]:
    for turns in plan.turns:
        for turn in turns:
            if turn[0] in plan.paired and "".join(action.kind for action in turn) != "FB":
                yield f"{format_turn(turn)} cannot run together; a pair is a forward, then a backward (B)"


def order_problems(plan: Plan) -> Iterator[str]:
    """Yield messages from one stage to another that the receiver consumes in an order other than the order of sending.

    The order is checked between two stages, not between two ranks: in a V, neighbours exchange activations of one chunk
    and gradients of the other over the same link, and a rank may consume a later message first. The receiver posts its
    receives in the order of sending.
    """
    position = {action: index for actions in plan.ranks for index, action in enumerate(actions)}
    for receiver, actions in enumerate(plan.ranks):
        latest: dict[tuple[int, bool], Action] = {}
        for action in actions:
            source = plan.source(action)
            sender = plan.sender(action)
            if source is None or sender is None:
                continue
            stream = source.stage, source.kind == "F"
            before = latest.get(stream)
            if before is not None and position[before] > position[source]:
                yield f"rank {receiver} consumes {before} before {source}, but rank {sender} sends {source} first"
            else:
                latest[stream] = source
