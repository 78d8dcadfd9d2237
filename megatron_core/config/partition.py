"""The assignment of layers to stages, and the plan of a run."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from megatron_core.config import RunConfig
from megatron_core.config.flops import forward_flops_per_token, layer_flops
from megatron_core.errors import LayoutError
from megatron_core.schedules import make_plan
from megatron_core.schedules.actions import Plan
from megatron_core.schedules.checks import check_plan


@dataclass(frozen=True)
class Ends:
    """Costs of embedding and output layer; a layer costs 1."""

    embedding: Fraction = Fraction(0)
    """Cost of the embedding."""
    output: Fraction = Fraction(0)
    """Cost of the output layer and the loss."""
    as_layers: bool = False
    """Whether an embedding or output layer with a cost counts as a layer, so that its stage needs no other layer."""

    @classmethod
    def of(cls, config: RunConfig, vocab_size: int) -> "Ends":
        """Costs from model FLOPs.

        The output layer costs its matrix product, 2 h V per token; the embedding is a look-up and costs 0.
        """
        flops = forward_flops_per_token(config.model, config.data.seq_length, vocab_size)
        output = flops.pop("logits") + flops.pop("mtp", 0)
        return cls(output=Fraction(output * config.model.num_layers, sum(flops.values())))


def layers_by_stage(config: RunConfig, vocab_size: int, num_stages: int) -> list[range]:
    """The layers of every stage: as the settings of ``config`` assign them, else by ``partition``."""
    num_layers = config.model.num_layers
    assigned = config.parallel.stages(config, num_stages)
    if assigned is not None:
        return assigned
    ends = Ends.of(config, vocab_size)
    if config.model.layers_differ_in_size:
        layer_costs = [sum(layer_flops(config.model, n, config.data.seq_length).values()) for n in range(num_layers)]
        return partition_by_cost(layer_costs, num_stages, round(ends.output * sum(layer_costs) / num_layers))
    return partition(num_layers, num_stages, ends)


def partition_by_cost(costs: Sequence[int], num_stages: int, output: int = 0) -> list[range]:
    """Split layers with these ``costs`` as ``partition``; ``output``: cost of the output layer on the last stage.

    Of all splits whose most expensive stage is cheapest, late stages get as many layers as possible, because early ones
    hold the activations of more micro-batches.
    """
    if num_stages > len(costs):
        return partition(len(costs), num_stages)  # raises the error

    def runs(most: int) -> list[range]:
        """Stages that cost at most ``most``, from the last one on; some layers are left if ``most`` is too low."""
        stages, stop = list[range](), len(costs)
        for stage in reversed(range(num_stages)):
            start, cost = stop, output * (stage == num_stages - 1)
            while start > stage and cost + costs[start - 1] <= most:
                start -= 1
                cost += costs[start]
            stages.insert(0, range(start, stop))
            stop = start
        return stages

    def fits(most: int) -> bool:
        return runs(most)[0].start == 0 and all(runs(most))

    # A higher bound never needs more stages, so the lowest one that fits is found by bisection.
    return runs(bisect_left(range(sum(costs) + output), True, key=fits))


def partition(num_layers: int, num_stages: int, ends: Ends | None = None) -> list[range]:
    """Split layers into contiguous runs, each with at least one layer, so that the most expensive stage is cheapest.

    Each layer is added to the cheapest stage so far. As all layers cost the same, no split has a cheaper most expensive
    stage. Among stages of equal cost, stages in the middle are preferred, then the first one, then the last.
    """
    ends = ends or Ends()
    first, final = 0, num_stages - 1
    # Fractions, because stages of equal cost must compare as equal: the place decides between them.
    costs, sizes = [Fraction(0)] * num_stages, [1] * num_stages
    for stage, end in ((first, ends.embedding), (final, ends.output)):
        costs[stage] += end
        if ends.as_layers and end:
            sizes[stage] = 0
    if sum(sizes) > num_layers:
        raise LayoutError(
            f"num_layers={num_layers} is less than one for each of the {num_stages} pipeline stages (ranks x chunks); "
            f"use at most {num_layers + sizes.count(0)} stages, or a pipeline_model_parallel_layout with empty stages"
        )
    for _ in range(num_layers - sum(sizes)):
        cheapest = min(range(num_stages), key=lambda s: (costs[s] + sizes[s], s == final, s == first, s))
        sizes[cheapest] += 1
    return layer_runs(sizes)


def layer_runs(sizes: Iterable[int]) -> list[range]:
    """Contiguous runs of layers with these numbers of layers."""
    return [range(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def describe_stages(stages: list[range], stage_to_rank: tuple[int, ...]) -> str:
    """One line per rank: ``pipeline rank 0: embedding, layers 0-2 | layers 6-8``."""
    lines = []
    for rank in sorted(set(stage_to_rank)):
        contents = [_contents(stages, stage) for stage in range(len(stages)) if stage_to_rank[stage] == rank]
        lines.append(f"pipeline rank {rank}: {' | '.join(contents)}")
    return "\n".join(lines)


def _contents(stages: list[range], stage: int) -> str:
    """The contents of a stage, as text."""
    layers = stages[stage]
    words = ["embedding"] * (stage == 0)
    if len(layers) > 1:
        words.append(f"layers {layers.start}-{layers.stop - 1}")
    elif layers:
        words.append(f"layer {layers.start}")
    words += ["output"] * (stage == len(stages) - 1)
    return ", ".join(words) or "empty stage"


def plan_of(config: RunConfig, num_microbatches: int) -> Plan:
    """The checked plan of ``config`` for ``num_microbatches`` on each rank; ``ConfigError`` if sizes differ."""
    return config.parallel.plan(config, num_microbatches, _checked_plan)


@lru_cache(maxsize=64)
def _checked_plan(name: str, num_ranks: int, num_chunks: int, num_microbatches: int, *, paired: bool) -> Plan:
    """The checked plan, made once for all ranks of a simulated world: for 16 ranks with 8 chunks it takes 0.25 s."""
    return check_plan(make_plan(name, num_ranks, num_chunks, num_microbatches, paired=paired), num_microbatches)
