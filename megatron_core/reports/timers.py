"""Lines with the times of all ranks: Megatron-LM's timers and its straggler report."""

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

COMPUTE = ("forward", "backward", "weight gradients")


def timer_lines(ranks: Sequence[dict[str, Any]], level: int, option: Literal["max", "minmax", "all"]) -> list[str]:
    """Lines of ``--timing-log-level``, in milliseconds: phases at level 1, and exposed collectives at level 2.

    ``ranks`` have ``phases`` and ``exposed`` in seconds, by name.
    """
    if level == 0:
        return []
    sections = ("phases", "exposed") if level > 1 else ("phases",)
    tables = [{name: 1000.0 * s for section in sections for name, s in rank[section].items()} for rank in ranks]
    names = list(dict.fromkeys(name for table in tables for name in table))
    head = {"minmax": "(min, max) time across ranks (ms):", "max": "max time across ranks (ms):"}
    lines = [head.get(option, "times across ranks (ms):")]
    for name in names:
        times = [table.get(name, 0.0) for table in tables]
        label = f"    {name} ".ljust(52, ".") + ":"
        if option == "all":
            lines += [f"  {name}:", *(f"     rank {rank:2d}: {time:.2f}" for rank, time in enumerate(times))]
        elif option == "max":
            lines.append(f"{label} {max(times):.2f}")
        else:
            lines.append(f"{label} ({min(times):.2f}, {max(times):.2f})")
    return lines


def slowest_ranks(ranks: Sequence[dict[str, Any]], count: int) -> list[str]:
    """Lines of ``--log-straggler``: the ``count`` slowest and fastest ranks in forward and backward.

    These times do not include waiting for other ranks, so that the slowest rank is the one the others wait for.
    """
    times = [sum(rank["phases"].get(name, 0.0) for name in COMPUTE) for rank in ranks]
    order = sorted(range(len(ranks)), key=lambda rank: -times[rank])
    middle = median(times)

    def named(rank: int) -> str:
        where = f"rank {rank} {ranks[rank]['prefix']} on {ranks[rank]['host']}"
        return f"{where} {1000 * times[rank]:.3g} ms ({times[rank] / middle if middle else 1.0:.2f} of the median)"

    slow = order[:count]
    fast = order[-count:][::-1]
    return [f"stragglers: slowest {', '.join(map(named, slow))}", f"            fastest {', '.join(map(named, fast))}"]
