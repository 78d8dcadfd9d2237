"""Division of a list of layers into pipeline stages: bounds[s] and bounds[s + 1] are the ends of stage s."""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from megatron_core.config.partition import partition_by_cost
from megatron_core.errors import ConfigError, LayoutError

METHODS = "'uniform', 'parameters', 'flops', 'type:REGEX', or the number of layers of each stage"


# The arguments have DeepSpeed's names: its programs call both functions.
def uniform_bounds(num_items: int, num_parts: int) -> list[int]:
    """Give each part num_items // num_parts layers, and one more to each of the first num_items % num_parts."""
    size, more = divmod(num_items, num_parts)
    return [part * size + min(part, more) for part in range(num_parts + 1)]


def balanced_bounds(weights: Sequence[float], num_parts: int) -> list[int]:
    """Divide layers of these weights so that the difference between heaviest and lightest stage is small.

    spread(i, s) for the first i layers on s stages is the minimum over k of max(M(k, s - 1), W) - min(m(k, s - 1), W),
    where W is the weight of layers k to i - 1, and M, m are the heaviest and the lightest stage of the chosen division
    of the first k; of equal ones the largest k. It is the rule of DeepSpeed 0.19 for ``parameters`` and ``type:``.
    """
    count = len(weights)
    if count <= num_parts:
        return uniform_bounds(count, num_parts)
    sums = [0.0, *accumulate(map(float, weights))]
    nothing = float("inf")
    best: dict[tuple[int, int], tuple[float, float, int]] = {(0, 0): (0.0, nothing, 0)}
    for number in range(1, count + 1):
        for stage in range(1, min(number, num_parts) + 1):
            smallest = nothing
            for start in range(stage - 1, number):
                if (start, stage - 1) not in best:
                    continue
                most, least, _ = best[start, stage - 1]
                weight = sums[number] - sums[start]
                most = max(most, weight)
                least = min(least, weight)
                if most - least <= smallest:
                    smallest = most - least
                    best[number, stage] = (most, least, start)
    bounds = [count]
    for stage in range(num_parts, 0, -1):
        bounds.append(best[bounds[-1], stage][2])
    return bounds[::-1]


def check_partition_method(method: Any, names: Sequence[str], *, has_example: bool) -> None:
    """ConfigError unless ``method`` is legal for some number of stages of a model with modules of these classes."""
    if not isinstance(method, str):
        is_list = isinstance(method, Sequence)
        if not is_list or not method or not all(type(count) is int and count >= 1 for count in method):
            raise ConfigError(f"partition_method={method!r} must be one of {METHODS} (each >= 1)")
    elif method.lower().startswith("type:"):
        _matches(method, names)
    elif method.lower() == "flops" and not has_example:
        raise ConfigError(
            f"partition_method={method!r} needs example=, the inputs of a micro-batch; legal without it: {METHODS}"
        )
    elif method.lower() not in ("uniform", "parameters", "flops"):
        raise ConfigError(f"partition_method={method!r} is unknown; legal: {METHODS}")


def stage_ranges(
    method: str | Sequence[int],
    names: Sequence[str],
    stages: int,
    *,
    parameters: Callable[[], Sequence[float]],
    flops: Callable[[], Sequence[int]] | None = None,
) -> list[range]:
    """Return the layers of each stage by ``partition_method``; ``names`` are the classes of all layers.

    ``parameters()`` returns the number of trained parameters of each layer, ``flops()`` its FLOPs. Errors:
    ``ConfigError`` for an unknown method; ``LayoutError`` if a stage has no layer.
    """
    check_partition_method(method, names, has_example=flops is not None)
    count = len(names)
    if count < stages:
        raise LayoutError(
            f"the model has {count} layers, fewer than its {stages} pipeline stages (ranks x chunks); use fewer stages"
        )
    if not isinstance(method, str):
        bounds = [0, *accumulate(method)]
        if len(method) != stages or bounds[-1] != count or min(method) < 1:
            raise LayoutError(
                f"partition_method={list(method)} must have one number >= 1 for each of {stages} stages, {count} in all"
            )
    elif method.lower() == "uniform":
        bounds = uniform_bounds(count, stages)
    elif method.lower() == "parameters":
        bounds = balanced_bounds(parameters(), stages)
    elif method.lower().startswith("type:"):
        bounds = balanced_bounds(_matches(method, names), stages)
    else:
        assert flops is not None
        return partition_by_cost(list(flops()), stages)
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _matches(method: str, names: Sequence[str]) -> list[float]:
    try:
        expression = re.compile(method.partition(":")[2], re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method={method!r}: {error}; correct the regular expression") from None
    matches = [float(expression.search(name) is not None) for name in names]
    if not any(matches):
        raise ConfigError(
            f"partition_method={method!r} matches no layer; their classes are {', '.join(dict.fromkeys(names))}"
        )
    return matches
