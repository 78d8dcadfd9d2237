"""Describe layouts as text: tables, reasons, memory over a step, command lines."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.partition import layers_by_stage, plan_of
from megatron_core.config.validate import problems, without_data
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.planner.cost import KINDS, Pipeline
from megatron_core.planner.footprint import MEMORY_KINDS, Footprint
from megatron_core.planner.layout import Layout
from megatron_core.planner.layout_settings import KEPT, Settings, describe_layout, micro_batch_sizes, with_settings
from megatron_core.planner.parameters import rank_units
from megatron_core.planner.search import Candidate, Search

WORDS = {"other": "data, logging", "products": "matrix products", "elements": "norms, activations", "host": "offload"}
"""Descriptions of the kinds of time with unclear names."""
_COLUMNS = 72


def readable_bytes(size: float) -> str:
    """Format with three significant digits and a binary unit: ``13.2 GiB``."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 999.5 and len(units) > 1:
        size = size / 1024
        units = units[1:]
    decimals = 0 if units[0] == "B" else (size < 99.95) + (size < 9.995)
    return f"{size:.{decimals}f} {units[0]}"


def readable_seconds(seconds: float) -> str:
    """Format with three significant digits and a unit: ``8.06 ms``."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"


def readable_duration(seconds: float) -> str:
    """Format with three significant digits and the largest unit that fits: ``2.5 hours``."""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    return next((f"{seconds / size:,.3g} {unit}" for unit, size in units if seconds >= size), readable_seconds(seconds))


def layout_table(candidates: Sequence[Candidate], world_size: int) -> str:
    """Return a table with one line per layout."""
    lines = [f"{'':3}{'step':>9}  {'tokens/s':>9} {'TFLOP/s':>8} {'memory':>9} {'bubble':>7} {'exposed':>8}  layout"]
    for number, candidate in enumerate(candidates, 1):
        cost = candidate.cost
        lines.append(
            f"{number:2} {readable_seconds(candidate.seconds):>9}  {cost.tokens_per_second:9,.0f} "
            f"{cost.flops_per_second / 1e12:8.3g} {readable_bytes(candidate.bytes):>9} {cost.bubble:7.1%} "
            f"{cost.exposed_communication / candidate.seconds:8.1%}  {describe_layout(candidate.config, world_size)}"
        )
    return "\n".join([*lines, "tokens/s and TFLOP/s of one device; exposed: communication without overlap"])


def details(candidate: Candidate) -> str:
    """Return time and memory of a layout by kind."""
    cost = candidate.cost
    times = [
        f"{WORDS.get(label, label)} {readable_seconds(cost.by_kind[label])} ({cost.by_kind[label] / cost.seconds:.0%})"
        for label in (*KINDS, "other")
        if cost.by_kind.get(label, 0.0) > 0.002 * cost.seconds
    ]
    sizes = [f"{label} {readable_bytes(candidate.memory[label])}" for label in MEMORY_KINDS if candidate.memory[label]]
    host = f"; on the host {readable_bytes(candidate.on_host)}" if candidate.on_host else ""
    return f"time: {', '.join(times)}\nmemory of pipeline rank {candidate.rank}: {', '.join(sizes)}{host}"


def whole_training(candidate: Candidate, world_size: int, price: float | None) -> str:
    """Return tokens, time and device hours of the training, and its price for ``price`` of a device and an hour.

    Only steps are counted, at full batch size. If the length of the training is unknown, only the price of a million
    tokens is known; without ``price`` the result is empty.
    """
    cost = candidate.cost
    replicas = candidate.config.parallel.data_parallel_size(world_size)
    steps = candidate.config.training.num_iterations(replicas, candidate.config.data.seq_length)
    if steps == 0:
        device_hours = cost.seconds / 3600 * world_size / cost.tokens * 1e6
        return "" if price is None else f"price {device_hours * price:.4g} for a million tokens"
    hours = steps * cost.seconds / 3600
    tokens = steps * cost.tokens
    paid = f"training: {steps:,} steps, {tokens:.3g} tokens, {hours:.3g} h, {hours * world_size:.3g} device hours"
    if price is None:
        return paid
    total = hours * world_size * price
    return f"{paid}; price {total:,.2f}, {total / tokens * 1e6:.4g} for a million tokens"


def why_slower(slower: Candidate, best: Candidate) -> str:
    """Explain why a layout is slower: the kinds of time that differ, largest difference first."""
    kinds = set(slower.cost.by_kind) | set(best.cost.by_kind)
    more = {label: slower.cost.by_kind.get(label, 0.0) - best.cost.by_kind.get(label, 0.0) for label in kinds}
    difference = slower.seconds - best.seconds
    least = 0.1 * max(difference, 0.002 * best.seconds)
    loses = [label for label in sorted(more, key=lambda k: -more[k]) if more[label] > least]
    gains = [label for label in sorted(more, key=lambda k: more[k]) if more[label] < -least]
    clauses = [", ".join(f"{WORDS.get(label, label)} +{readable_seconds(more[label])}" for label in loses[:4])]
    if gains:
        saved = ", ".join(f"{WORDS.get(label, label)} -{readable_seconds(-more[label])}" for label in gains[:3])
        clauses.append(f"although it saves {saved}")
    because = "; ".join(clause for clause in clauses if clause) or "small parts of everything"
    return f"{readable_seconds(difference)} ({difference / best.seconds:.1%}) slower: {because}"


def start_command(config: RunConfig, base: RunConfig, arguments: Sequence[str], world_size: int, per_node: int) -> str:
    """Return the command that starts a layout: the planner's arguments and the flags of changed settings."""
    before = base.flat()
    flags = list(arguments)
    for name, value in config.flat().items():
        if value != before[name]:
            flags += flag_of(name, value)
    local = min(world_size, per_node)
    nodes = f" --nnodes {world_size // local}" if world_size > local else ""
    return f"torchrun --nproc-per-node {local}{nodes} -m megatron_core.commands.train {shlex.join(flags)}"


def flag_of(name: str, value: Any) -> list[str]:
    """Return a setting as command-line arguments."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]


_EXTRA = {
    "selective-recompute": KEPT[1],
    "full-recompute": KEPT[2],
    "activation-offload": KEPT[3],
    "optimizer-offload": {"optimizer_cpu_offload": True},
}


def parse_words(config: RunConfig, text: str, world_size: int) -> list[RunConfig]:
    """Return the layouts that match ``text``, such as ``tp8 pp2 sp zero1 mbs2 full-recompute``.

    If ``text`` does not name them, DP and sequence parallelism are derived, and ZeRO stage, micro-batch size and
    recomputation are varied. ``LayoutError`` for unknown words and for sizes whose product is not ``world_size``.
    """
    words = text.split()
    micro = [int(word[3:]) for word in words if re.fullmatch(r"mbs[1-9]\d*", word)]
    extra = [word for word in words if word in _EXTRA]
    layout_words = [word for word in words if word not in extra and not re.fullmatch(r"mbs[1-9]\d*", word)]
    named = {match[1] for word in layout_words if (match := re.fullmatch(r"([a-z]+)\d+", word))}
    layout = Layout.parse(" ".join(layout_words))
    ranks = layout.tp * layout.cp * layout.pp
    if "dp" not in named and world_size % ranks == 0:
        layout = Layout.parse(" ".join([*layout_words, f"dp{world_size // ranks}"]))
    if layout.world_size != world_size:
        raise LayoutError(
            f"layout {text!r} has tp{layout.tp} x cp{layout.cp} x pp{layout.pp} x dp{layout.dp} = "
            f"{layout.world_size} ranks, but gpus={world_size}; choose sizes whose product is {world_size}"
        )
    settings = layout.settings()
    if layout.tp > 1 and "sp" not in words:
        settings["sequence_parallel"] = True
    sizes = micro_batch_sizes(config, layout.dp)
    recomputations = [choice for choice in KEPT[:3]] if not set(extra) - {"optimizer-offload"} else [{}]
    chosen = {name: value for word in extra for name, value in _EXTRA[word].items()}
    if chosen.get("cpu_offloading"):
        chosen["cpu_offloading_num_layers"] = config.model.num_layers
    by_stage = [{"zero_stage": n, "overlap_grad_reduce": True, "overlap_param_gather": n > 0} for n in range(4)]
    stages: list[dict[str, Any]] = [{}] if "zero" in text else by_stage
    return [
        with_settings(config, settings | choice | stage | chosen | {"micro_batch_size": size})
        for choice, stage, size in product(recomputations, stages, micro or sizes or [1])
    ]


def objection(search: Search, text: str, best: Candidate | None) -> str:
    """Explain why a layout was not chosen: a violated rule, too much memory, or more time."""
    candidates: list[Candidate] = []
    faults: list[str] = []
    for config in parse_words(search.config, text, search.devices):
        try:
            candidates.append(search.candidate(config))
        except LayoutError as error:
            faults.append(str(error))
    if not candidates:
        return f"{text} cannot run: {faults[0]}"
    fitting = [candidate for candidate in candidates if search.fits(candidate.memory)]
    chosen = min(fitting) if fitting else min(candidates, key=lambda candidate: candidate.bytes)
    head = f"{describe_layout(chosen.config, search.devices)}: {readable_seconds(chosen.seconds)} a step, "
    head += f"{readable_bytes(chosen.bytes)} of {readable_bytes(search.hardware.usable_bytes)}"
    lines = [head, details(chosen)]
    if not fitting:
        largest = max(chosen.memory, key=lambda category: chosen.memory[category])
        missing = chosen.bytes - search.hardware.usable_bytes
        lines.append(f"does not fit: {readable_bytes(missing)} too much, most of it {largest}; {_helps(largest)}")
    elif best is None or chosen.seconds <= best.seconds:
        lines.append("no disadvantage: it is as fast as the best layout")
    else:
        lines.append(f"against {describe_layout(best.config, search.devices)}: {why_slower(chosen, best)}")
    return "\n".join(lines)


def _helps(category: str) -> str:
    return {
        "weights": "more tensor or pipeline ranks, or --zero-stage 3",
        "gradients": "more tensor or pipeline ranks, or --zero-stage 2",
        "optimizer": "--zero-stage 1, or --optimizer-cpu-offload",
    }.get(category, "recomputation, a smaller --micro-batch-size, more tensor or context ranks, or --cpu-offloading")


@dataclass(frozen=True)
class MemoryOverStep:
    """Bytes of a pipeline rank by kind over the time of a step."""

    rank: int
    times: list[float]
    kinds: dict[str, list[float]]

    @classmethod
    def of(cls, pipeline: Pipeline, footprint: Footprint, rank: int) -> "MemoryOverStep":
        """From the simulated plan: memory grows in a forward and shrinks in a B or W."""
        timeline = pipeline.timeline
        sizes = footprint.stage_sizes
        fixed = footprint.by_kind(rank)
        times = [0.0]
        stored = [0.0]
        level = 0.0
        for action in timeline.plan.ranks[rank]:
            before = level
            level += sizes[action.stage] * {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            times += [timeline.start[action], timeline.end[action]]
            stored += [before, level]
        times.append(timeline.makespan)
        stored.append(level)
        kinds = {label: [fixed[label]] * len(times) for label in ("weights", "gradients", "optimizer") if fixed[label]}
        kinds["activations"] = stored
        busy = [0.0, *[1.0] * (len(times) - 2), 0.0]
        for label in ("units whole", "keys", "temporary", "fragments"):
            if fixed[label]:
                kinds[label] = [fixed[label] * share for share in busy]
        return cls(rank, times, kinds)

    def picture(self, limit: float, height: int = 16) -> str:
        """Draw bars over time, with one letter per kind, and the memory of the device as a line."""
        letters = {category: category[0] for category in self.kinds}
        end = self.times[-1] or 1.0
        rows = []
        columns = [self._at((c + 0.5) / _COLUMNS * end) for c in range(_COLUMNS)]
        most = max(sum(sizes.values()) for sizes in columns)
        top = max(limit, most) if most > limit / 3 else 1.1 * most
        for row in range(height, 0, -1):
            level = (row - 0.5) / height * top
            line = "".join(_letter(sizes, letters, level) for sizes in columns)
            mark = "-" if (row - 1) / height * top < limit <= row / height * top else " "
            rows.append(f"{readable_bytes(level):>9} |{line.replace(' ', mark)}|")
        legend = ", ".join(f"{letter} {category}" for category, letter in letters.items())
        axis = f"{'':9}  0{readable_seconds(end):>{_COLUMNS - 1}}"
        return "\n".join([*rows, axis, f"{legend}; ---- {readable_bytes(limit)} of the device"])

    def _at(self, time: float) -> dict[str, float]:
        index = max((i for i, t in enumerate(self.times) if t <= time), default=0)
        return {category: sizes[index] for category, sizes in self.kinds.items()}


def _letter(sizes: dict[str, float], letters: dict[str, str], level: float) -> str:
    below = 0.0
    for category, size in sizes.items():
        below += size
        if level <= below:
            return letters[category]
    return " "


def predicted_bytes(config: RunConfig, world_size: int, vocab_size: int) -> float:
    """Highest peak bytes over all pipeline ranks."""
    copies = config.parallel.data_parallel_size(world_size)
    plan = plan_of(config, config.training.final_batch_size(copies) // (config.training.micro_batch_size * copies))
    layers = layers_by_stage(config, vocab_size, plan.num_stages)
    units = rank_units(config, layers, plan.stage_to_rank, vocab_size)
    return sum(Footprint.of(config, world_size, plan, layers, units, vocab_size).worst()[1].values())


def settings_that_fit(
    config: RunConfig, world_size: int, vocab_size: int, limit: float, count: int = 3
) -> list[tuple[Settings, float]]:
    """Up to ``count`` changes of settings that reduce every rank's peak to at most ``limit`` bytes, and the new peak.

    Single changes come before pairs of changes, and changes that cost little time before more expensive ones.
    """
    changes: list[tuple[Settings, float]] = []
    single = list(_changes(config, world_size))
    for chosen in chain(((candidate,) for candidate in single), combinations(single, 2)):
        change = {name: value for settings in chosen for name, value in settings.items()}
        other = with_settings(config, change)
        if len(change) < sum(map(len, chosen)) or next(problems(without_data(other), world_size), None) is not None:
            continue
        try:
            needed = predicted_bytes(other, world_size, vocab_size)
        except ConfigError:
            continue  # the schedule does not support this number of micro-batches
        if needed <= limit:
            changes.append((change, needed))
        if len(changes) == count:
            break
    return changes


def _changes(config: RunConfig, world_size: int) -> Iterator[Settings]:
    """Yield changes that reduce a rank's memory, cheapest first."""
    parallel = config.parallel
    size = config.training.micro_batch_size
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    if config.model.recompute_granularity is None:
        yield {"recompute_granularity": "selective"}
    for stage in range(parallel.dp_zero_stage + 1, 4):
        if parallel.data_parallel_size(world_size) > 1:
            yield {"zero_stage": stage, "use_distributed_optimizer": False}
    if size > 1:
        yield {"micro_batch_size": size // 2}
    if config.model.recompute_granularity != "full":
        yield {name: value for name, value in KEPT[2].items() if name != "cpu_offloading"}
    yield {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True}
    yield {"pipeline_model_parallel_size": 2 * pp}
    if size > 3:
        yield {"micro_batch_size": 1}
