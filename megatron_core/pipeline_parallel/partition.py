"""Which layers are on which stage."""

from __future__ import annotations

from megatron_core.errors import LayoutError


def partition(num_layers: int, num_stages: int) -> list[range]:
    """Contiguous runs of layers, as even as they go.

    Layers that are left over go to the stages in the middle first, because the first stage has the embedding and the
    last one the output layer and the loss.
    """
    if num_stages > num_layers:
        raise LayoutError(
            f"num_layers={num_layers} is less than the {num_stages} pipeline stages (ranks x chunks); "
            f"use at most {num_layers} stages"
        )
    each, left = divmod(num_layers, num_stages)
    by_load = sorted(range(num_stages), key=lambda stage: (stage == num_stages - 1, stage == 0, stage))
    sizes = [each + (stage in by_load[:left]) for stage in range(num_stages)]
    starts = [sum(sizes[:stage]) for stage in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def describe(stages: list[range], place: tuple[int, ...]) -> str:
    """One line a rank: ``pipeline rank 0: embedding, layers 0-2 | layers 6-8``."""
    lines = []
    for rank in sorted(set(place)):
        parts = []
        for stage, layers in enumerate(stages):
            if place[stage] != rank:
                continue
            named = [f"layers {layers.start}-{layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"]
            named = ["embedding"] * (stage == 0) + named + ["output"] * (stage == len(stages) - 1)
            parts.append(", ".join(named))
        lines.append(f"pipeline rank {rank}: {' | '.join(parts)}")
    return "\n".join(lines)
