"""The ranks of each group of a layout, by listing the coordinates of all ranks."""

from __future__ import annotations

DENSE = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
EXPERT = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
"""The axis that a name in the order of ranks stands for, for dense layers and for experts."""


def coordinates(sizes: dict[str, int], order: str) -> list[dict[str, int]]:
    """The coordinates of each rank: the first axis of ``order`` changes fastest (Narayanan et al. 2021, section 3;
    Liu et al. 2025, "MoE Parallel Folding", for experts)."""
    world = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    found: list[dict[str, int]] = [{} for _ in range(world)]
    for view in (DENSE, EXPERT):
        axes = [view[name] for name in order.split("-") if name in view]
        index = dict.fromkeys(axes, 0)
        for rank in range(world):
            found[rank].update(index)
            for axis in axes:  # count up like an odometer
                index[axis] += 1
                if index[axis] < sizes[axis]:
                    break
                index[axis] = 0
    return found


def groups(sizes: dict[str, int], order: str, axes: str) -> list[list[int]]:
    """The groups of ranks that differ only on ``axes``, each in ascending order, sorted by their first rank."""
    names = axes.split("-")
    view = DENSE if set(names) <= set(DENSE.values()) else EXPERT
    others = [axis for axis in view.values() if axis not in names]
    by_others: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(coordinates(sizes, order)):
        by_others.setdefault(tuple(place[axis] for axis in others), []).append(rank)
    return sorted(by_others.values())
