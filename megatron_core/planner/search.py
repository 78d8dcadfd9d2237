"""Find the fastest layouts of a model on a number of devices, among all layouts that fit into their memory.

The points are TP x PP x chunks and schedule x CP x EP x ETP x ZeRO x recomputation x offload x micro-batch size. The
search is branch and bound: points are ordered by a lower bound of the step's time (the arithmetic, which no schedule or
overlap can hide), and the search ends when the bound exceeds the time of the slowest layout in the result. The
configuration's own rules decide which layouts are legal.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import lcm
from random import Random
from time import monotonic
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.rule_helpers import divisors
from megatron_core.config.validate import problems, without_data
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.planner import layout_settings
from megatron_core.planner.cost import LayerTimes, Pipeline, StepCost, cost_of
from megatron_core.planner.footprint import Footprint
from megatron_core.planner.frontier import Frontier, Group, TimeLimit
from megatron_core.planner.hardware import Hardware
from megatron_core.planner.layer_time import LayerClock
from megatron_core.planner.parameters import Parameters, all_layers, embedding_parameters, layer_kinds
from megatron_core.schedules import schedules, training_schedules
from megatron_core.schedules.actions import Plan

SHAPE = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "pipeline_schedule", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)
"""Settings that distinguish layouts in the result; of layouts with equal values only the fastest is kept."""
MOST_CHUNKS, LISTING = 8, 0.5
SEEDING, RESERVE = 0.2, 0.05
"""Shares of the time limit for the list of points, for a sample of them, and for the end of what has begun."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout with its predicted time and memory."""

    seconds: float
    config: RunConfig = field(compare=False)
    cost: StepCost = field(compare=False)
    memory: dict[str, float] = field(compare=False)
    """Bytes by kind of the pipeline rank with the highest peak."""
    rank: int = field(compare=False)
    on_host: float = field(compare=False, default=0.0)

    @property
    def bytes(self) -> float:
        """Peak bytes on a device."""
        return sum(self.memory.values())

    @property
    def shape(self) -> tuple[Any, ...]:
        """The values of the settings ``SHAPE``."""
        return tuple(getattr(self.config.parallel, name) for name in SHAPE)


@dataclass
class Search:
    """Searches layouts of ``config`` on ``devices`` devices of a machine.

    ``progress`` is called periodically with the number of processed points, the number of all points and the best time.
    """

    config: RunConfig
    devices: int
    hardware: Hardware
    vocab_size: int
    progress: Callable[[int, int, float], None] = lambda decided, total, best: None
    seconds: float = 30.0
    """Time limit of ``best``."""
    clock: Callable[[], float] = monotonic
    points: int = 0
    evaluated: int = 0
    too_large: int = 0
    decided: int = 0
    """Points that were evaluated, or are too large; those with a larger bound than the result need no decision."""
    stopped: bool = False
    """Whether the time limit ended the search, so that other layouts may be faster."""
    bound: float = 0.0
    """If it stopped: a time that no other layout is faster than, or 0 if not all were listed."""
    _stages: dict[int, list[layout_settings.Settings]] = field(default_factory=dict)
    _nearest: tuple[float, RunConfig] | None = None
    _clocks: dict[tuple[Any, ...], LayerTimes] = field(default_factory=dict)
    _splits: dict[tuple[int, int], list[range]] = field(default_factory=dict)
    _parameters: dict[tuple[Any, ...], Parameters] = field(default_factory=dict)
    _kinds: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _sections: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def best(self, count: int = 10) -> list[Candidate]:
        """The ``count`` fastest layouts that fit, fastest first, with different shapes.

        After ``seconds`` the search stops, and the result is the fastest so far. ``LayoutError`` if none fits, with the
        layout that needs least memory and suggestions, or if none was found in this time.
        """
        if self.devices < 1:
            raise ConfigError(f"gpus={self.devices} is out of range; legal: 1, 2, 3, ...")
        if (teacher := self.config.optional("kd_teacher")) is not None:
            raise ConfigError(
                f"kd_teacher={teacher}: the planner does not know the teacher's model; remove --kd-teacher, and "
                "keep memory for the teacher's weights"
            )
        if self.config.training.global_batch_size is None:
            raise ConfigError(
                "global_batch_size=None: layouts are compared on the same batch; give --global-batch-size, the "
                "number of sequences of an optimizer step"
            )
        limit = TimeLimit(self.seconds, self.clock)
        frontier = Frontier(self._points_of)
        seeds = list[layout_settings.Settings]()
        for bound, group in self._groups():
            frontier.add(bound, group)
            seeds += self._seeds(group)
            if limit.passed(LISTING):
                self.stopped = True
                break
        fastest: dict[tuple[Any, ...], Candidate] = {}
        # A sample of layouts that need little memory. The fastest points by their bounds often do not fit, so that a
        # search that ends early would have found none.
        Random(0).shuffle(seeds)
        for settings in seeds:
            if limit.passed(LISTING + SEEDING) or len(fastest) >= count:
                break
            self._consider(settings, fastest, float("inf"))
        while (point := frontier.pop()) is not None:
            bound, settings = point
            worst = sorted(c.seconds for c in fastest.values())[count - 1] if len(fastest) >= count else float("inf")
            if bound >= worst:
                break
            if limit.passed(1 - RESERVE):
                self.bound = 0.0 if self.stopped else bound
                self.stopped = True
                break
            self._consider(settings, fastest, worst)
            self.decided += 1
            if self.decided % 64 == 0:
                self.progress(self.decided, self.points, min((c.seconds for c in fastest.values()), default=0.0))
        if not fastest:
            raise LayoutError(self._nothing_found() if self.stopped else self._nothing_fits())
        return sorted(fastest.values())[:count]

    def candidate(self, config: RunConfig) -> Candidate:
        """Return a layout's time and memory, whether or not it fits; ``LayoutError`` if the layout is not legal."""
        if faults := list(problems(without_data(config), self.devices)):
            raise LayoutError("; ".join(faults))
        pipeline = self._pipeline(config)
        footprint = self._footprint(pipeline)
        return self._timed(pipeline, footprint, *footprint.worst())

    def fits(self, memory: dict[str, float]) -> bool:
        """Whether ``memory`` fits into the device."""
        return sum(memory.values()) <= self.hardware.usable_bytes

    @property
    def _batch(self) -> int:
        return self.config.training.global_batch_size or 1

    # --- the points
    def _groups(self) -> Iterator[tuple[float, Group]]:
        """Yield a lower bound of the time, and all points with the same layers, without ZeRO and optimizer offload."""
        batch = self._batch
        for layers in self._layer_settings():
            ranks = layers["tensor_model_parallel_size"] * layers["context_parallel_size"]
            experts = layers.get("expert_model_parallel_size", 1) * (layers.get("expert_tensor_parallel_size") or 1)
            if not self._is_legal(self._with(layers), lcm(ranks, experts)):
                continue
            room = self.devices // ranks
            if room not in self._stages:
                self._stages[room] = self._stage_settings(room)
            sizes = Counter(stages["pipeline_model_parallel_size"] for stages in self._stages[room])
            variants = layout_settings.KEPT if self.hardware.has_host else layout_settings.KEPT[:-1]
            for micro, variant in product(layout_settings.micro_batch_sizes(self.config), variants):
                points = sum(number for pp, number in sizes.items() if batch % (micro * (room // pp)) == 0)
                if not points:
                    continue
                self.points += points
                away = {"cpu_offloading_num_layers": self.config.model.num_layers * variant["cpu_offloading"]}
                settings = layers | variant | away | {"micro_batch_size": micro}
                yield self._bound(settings), Group(settings, room)

    def _points_of(self, bound: float, group: Group) -> Iterator[tuple[float, layout_settings.Settings]]:
        """Yield the points of a group and lower bounds of their times."""
        micro = group.settings["micro_batch_size"]
        for stages in self._stages[group.room]:
            sequences = micro * (group.room // stages["pipeline_model_parallel_size"])
            if self._batch % sequences == 0:
                yield bound * self._waiting(stages, self._batch / sequences), group.settings | stages

    def _seeds(self, group: Group) -> list[layout_settings.Settings]:
        """The points of a group with full recomputation of the smallest micro-batches, without chunks."""
        settings = group.settings
        is_smallest = settings["micro_batch_size"] <= layout_settings.micro_batch_sizes(self.config)[0]
        if settings["recompute_granularity"] != "full" or settings["context_parallel_size"] > 1 or not is_smallest:
            return []
        return [
            point
            for _, point in self._points_of(0.0, group)
            if point["pipeline_schedule"] is None and point["num_virtual_stages_per_pipeline_rank"] is None
        ]

    def _layer_settings(self) -> Iterator[layout_settings.Settings]:
        """Yield TP, CP, EP and ETP whose products divide the number of devices."""
        experts = self.config.optional("num_experts")
        for cp in divisors(self.devices):  # first without, so that a short search has seen the usual layouts
            for tp in divisors(self.devices // cp):
                split = {"tensor_model_parallel_size": tp, "context_parallel_size": cp, "sequence_parallel": tp > 1}
                if experts is None:
                    yield split
                    continue
                for etp, ep in product(sorted({1, tp}), divisors(experts)):
                    if self.devices % (ep * etp) == 0:
                        yield split | {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}

    def _stage_settings(self, room: int) -> list[layout_settings.Settings]:
        """Legal combinations of PP, chunks and schedule for ``room`` ranks."""
        legal = []
        for pp, schedule in product(divisors(room), training_schedules()):
            chunks = schedules()[schedule].chunks
            most = min(MOST_CHUNKS, self.config.model.num_layers // pp)
            for v in range(2, most + 1) if chunks is None else [1]:
                stages = {
                    "pipeline_model_parallel_size": pp,
                    "num_virtual_stages_per_pipeline_rank": v if v > 1 else None,
                    "pipeline_schedule": None if schedule in ("1f1b", "interleaved") else schedule,
                }
                if (pp > 1 or schedule == "1f1b") and self._is_legal(self._with(stages), pp):
                    legal.append(stages)
        return legal

    def _variants(self, settings: layout_settings.Settings) -> Iterator[layout_settings.Settings]:
        """Yield ZeRO and offload settings, which do not change layer times. Overlap is always on: it uses no memory."""
        host = self.hardware.has_host and not self.config.optimizer.offloads_optimizer
        copies = self.devices // settings["tensor_model_parallel_size"] // settings["pipeline_model_parallel_size"]
        for stage in range(4 if copies > 1 else 1):
            zero = {"zero_stage": stage, "use_distributed_optimizer": False}
            zero |= {"overlap_grad_reduce": True, "overlap_param_gather": stage > 0}
            for offload in (False, True)[: 1 + host]:
                yield zero | {"optimizer_cpu_offload": offload or self.config.optimizer.optimizer_cpu_offload}

    # --- bounds

    def _bound(self, settings: layout_settings.Settings) -> float:
        """Lower bound of the step's seconds: all devices compute layers and head without idle time."""
        times = self._times(settings)
        full = settings["recompute_granularity"] == "full"
        away = settings["cpu_offloading"]
        counts = Counter(times.kinds)
        layers = sum(
            counts[layer_kind] * sum(times.layer(times.kinds.index(layer_kind), recomputed=full, offloaded=away).sums)
            for layer_kind in counts
        )
        ranks = settings["tensor_model_parallel_size"] * settings["context_parallel_size"]
        per_micro_batch = layers + sum(times.end(first=False).sums)
        return per_micro_batch * self._batch / settings["micro_batch_size"] * ranks / self.devices

    def _waiting(self, stages: layout_settings.Settings, micros: float) -> float:
        """Lower bound of the factor by which the pipeline's bubble lengthens the step, for equal stages."""
        pp = stages["pipeline_model_parallel_size"]
        chunks = stages["num_virtual_stages_per_pipeline_rank"] or 1
        if stages["pipeline_schedule"] not in (None, "gpipe"):
            return 1.0  # weight gradients fill the bubble
        return 1 + 0.9 * (pp - 1) / (micros * chunks)

    def _state_bytes(self, config: RunConfig) -> float:
        """Mean bytes of weights, gradients and optimizer state per stage: a lower bound for the largest stage."""
        key = _split_of(config)
        if key not in self._parameters:
            units = [*all_layers(config), embedding_parameters(config, self.vocab_size)]
            self._parameters[key] = Parameters.sum(units)
        total = self._parameters[key]
        share = Footprint(config, self.devices, NO_PLAN, (), ((total,),), self.vocab_size, {}).state(0)
        return (sum(share.values()) - share["units whole"]) / config.parallel.pipeline_model_parallel_size

    # --- one point

    def _consider(
        self, settings: layout_settings.Settings, fastest: dict[tuple[Any, ...], Candidate], worst: float
    ) -> None:
        """Evaluate all variants of a point; add those to ``fastest`` that fit and are faster than the known layouts."""
        pipeline: Pipeline | None = None
        fitted = -1
        for variant in self._variants(settings):
            if variant["optimizer_cpu_offload"] and fitted == variant["zero_stage"]:
                continue  # it fits without offload, which is faster
            config = self._with(settings | variant)
            self.evaluated += 1
            state = self._state_bytes(config)
            if state > self.hardware.usable_bytes:
                self.too_large += 1
                self._note_miss(state, config)
                continue
            if pipeline is None:
                if not self._is_legal(config):
                    return
                pipeline = self._pipeline(config)
                if pipeline.least_seconds >= worst:
                    return
                footprint = self._footprint(pipeline)
            pipeline = pipeline.variant(config)
            footprint = footprint.variant(config)
            rank, memory = footprint.worst()
            if not self.fits(memory):
                self.too_large += 1
                self._note_miss(sum(memory.values()), config)
                continue
            fitted = variant["zero_stage"]
            candidate = self._timed(pipeline, footprint, rank, memory)
            known = fastest.get(candidate.shape)
            if candidate.seconds < worst and (known is None or candidate < known) and self._is_legal(config):
                fastest[candidate.shape] = candidate

    def _note_miss(self, needed: float, config: RunConfig) -> None:
        """Remember the layout with the least memory of all that do not fit; ``needed`` may be only its state."""
        if (self._nearest is None or needed < self._nearest[0]) and self._is_legal(config):
            self._nearest = needed, config

    def _pipeline(self, config: RunConfig) -> Pipeline:
        times = self._times(layout_settings.layer_settings(config))
        return Pipeline(config, self.devices, times.clock, times)

    def _footprint(self, pipeline: Pipeline) -> Footprint:
        split = pipeline.plan, pipeline.layers, pipeline.units
        return Footprint.of(pipeline.config, self.devices, *split, self.vocab_size)

    def _timed(self, pipeline: Pipeline, footprint: Footprint, rank: int, memory: dict[str, float]) -> Candidate:
        cost = cost_of(pipeline)
        return Candidate(cost.seconds, pipeline.config, cost, memory, rank, footprint.on_host(rank))

    def _times(self, settings: layout_settings.Settings) -> LayerTimes:
        """Cached layer times for ``LAYER_SETTINGS``; the placement of their groups does not depend on PP and DP."""
        key = tuple(settings.get(name) for name in layout_settings.LAYER_SETTINGS)
        if key not in self._clocks:
            chosen = {name: settings[name] for name in layout_settings.LAYER_SETTINGS if name in settings}
            config = self._with(chosen)
            clock = LayerClock(config, self.hardware, self.devices, self.vocab_size)
            self._clocks[key] = LayerTimes(clock, self._splits, self._layer_kinds(config))
        return self._clocks[key]

    def _layer_kinds(self, config: RunConfig) -> list[int]:
        """Cached ``layer_kinds``; of the settings that the search varies, only sizes of adapters depend on some."""
        key = () if config.optional("lora_rank") is None else _split_of(config)
        if key not in self._kinds:
            self._kinds[key] = layer_kinds(config)
        return self._kinds[key]

    def _with(self, settings: layout_settings.Settings) -> RunConfig:
        """Return the configuration with ``settings``, and with neutral values of all other layout settings."""
        smallest = {"micro_batch_size": 2} if self.config.optional("dpo") else {}
        return layout_settings.with_settings(self.config, layout_settings.NEUTRAL | smallest | settings, self._sections)

    def _is_legal(self, config: RunConfig, world_size: int | None = None) -> bool:
        return next(problems(without_data(config), world_size or self.devices), None) is None

    def _nothing_found(self) -> str:
        return (
            f"no layout that fits was found in {self.seconds:g} s, with {self.evaluated:,} of {self.points:,} layouts "
            "evaluated; give --time-limit with more seconds"
        )

    def _nothing_fits(self) -> str:
        model = self.config.model
        where = f"{self.devices} x {self.hardware.name} with {self.hardware.usable_bytes / 2**30:.1f} GiB each"
        if self._nearest is None:
            return (
                f"no layout of num_layers={model.num_layers}, hidden_size={model.hidden_size}, global_batch_size="
                f"{self.config.training.global_batch_size} is possible on {where}; take more devices, or a batch and "
                "sizes with more divisors"
            )
        config = self._nearest[1]
        needed = self.candidate(config).bytes
        more = -(-needed * self.devices // self.hardware.usable_bytes)
        return (
            f"no layout fits on {where}: the nearest miss, {layout_settings.describe_layout(config, self.devices)}, "
            f"needs {needed / 2**30:.1f} GiB; take about {more:.0f} devices, a shorter seq_length="
            f"{self.config.data.seq_length}, or devices with more memory"
        )


def _split_of(config: RunConfig) -> tuple[int, ...]:
    """The sizes that divide a layer's parameters."""
    parallel = config.parallel
    return parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size, parallel.expert_tensor_size


NO_PLAN = Plan(((),), (0,))
