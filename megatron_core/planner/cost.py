"""Seconds of a training step on a machine: stages, pipeline, gradients, optimizer.

The run's own pipeline plan is simulated with the times of each stage. If the layout overlaps communication, gradient
reductions overlap with the backward of one micro-batch, and weight gathers with a forward.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from megatron_core.config import RunConfig
from megatron_core.config.flops import flops_per_token
from megatron_core.config.partition import layers_by_stage
from megatron_core.planner.hardware import Hardware, Rings
from megatron_core.planner.layer_time import LayerClock, Passes, Seconds, total
from megatron_core.planner.memory import recomputed_layers
from megatron_core.planner.parameters import Parameters, layer_kinds, rank_units
from megatron_core.planner.simulate import StageCosts, Timeline, simulate
from megatron_core.schedules import make_plan
from megatron_core.schedules.actions import Plan

KINDS = ("products", "attention", "elements", "launches", "tp", "cp", "ep", "host", "pp", "dp", "bubble", "optimizer")
"""Kinds of a step's time, in the order of reports; ``other`` is the fixed time of a step."""


@dataclass(frozen=True)
class StepCost:
    """Time of a step, and its parts by kind on the busiest rank."""

    seconds: float
    by_kind: Seconds
    bubble: float
    """Idle share of the ranks' time in the pipeline."""
    tokens: int
    flops: float
    """Model FLOPs, without recomputation."""
    world_size: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.seconds / self.world_size

    @property
    def flops_per_second(self) -> float:
        """Model FLOPs per second and device."""
        return self.flops / self.seconds / self.world_size

    @property
    def exposed_communication(self) -> float:
        """Seconds of collectives and messages that do not overlap with computation."""
        return sum(self.by_kind.get(axis, 0.0) for axis in ("tp", "cp", "ep", "pp", "dp"))


def _plan(config: RunConfig, micros: int) -> Plan:
    """Return the run's plan; plans of built-in schedules need no check and are cached across layouts."""
    return config.parallel.plan(config, micros, _made)


_made = lru_cache(maxsize=512)(make_plan)


class Pipeline:
    """The stages of a configuration with their times; layouts with the same layers may share ``clock``."""

    def __init__(self, config: RunConfig, world_size: int, clock: LayerClock, layer_times: "LayerTimes") -> None:
        self.config = config
        self.world_size = world_size
        self.clock = clock
        self.rings = Rings(clock.hardware, config.parallel, world_size)  # clock.rings may have other PP and DP sizes
        self.copies = config.parallel.data_parallel_size(world_size)
        batch = config.training.final_batch_size(self.copies)
        self.micros = batch // (config.training.micro_batch_size * self.copies)
        self.plan = _plan(config, self._simulated_micros)
        self.layers = layer_times.split(config, self.plan.num_stages)
        self.units = rank_units(config, self.layers, self.plan.stage_to_rank, clock.vocab_size, layer_times.kinds)
        self.passes = [layer_times.stage(config, run, stage, len(self.layers)) for stage, run in enumerate(self.layers)]
        if config.optional("dpo"):  # the reference has a forward of its own
            self.passes = [Passes.sum([policy, Passes(policy.forward, {}, {})]) for policy in self.passes]

    def variant(self, config: RunConfig) -> "Pipeline":
        """Return these stages with another ``config``, which differs only in ZeRO, overlap, optimizer and offload."""
        other = copy(self)
        other.config = config
        for name in ("zero_traffic", "stage_costs", "timeline", "makespan"):
            vars(other).pop(name, None)
        if "timeline" in vars(self) and other.stage_costs.times == self.stage_costs.times:
            vars(other).update(timeline=self.timeline, makespan=self.makespan)
        return other

    @property
    def _simulated_micros(self) -> int:
        """Number of simulated micro-batches; fewer than all of them if there are many, as every p of them repeat."""
        ranks = self.config.parallel.pipeline_model_parallel_size
        if self.config.parallel.plan_name or self.micros <= 3 * ranks:
            return self.micros
        return 2 * ranks + self.micros % ranks

    @cached_property
    def stage_costs(self) -> StageCosts:
        """Seconds of each kind of action in each stage, including ZeRO's gathers and reductions per micro-batch."""
        split = any(action.kind == "I" for actions in self.plan.ranks for action in actions)
        message = 0.0
        if len(self.plan.ranks) > 1:
            clock = self.clock
            size = clock.stream_bytes * clock.tokens * self.config.model.stream_size / clock.parts
            message = self.rings.ring("pp").send(size)
        waits = 0.0 if self.config.parallel.overlap_p2p_communication else message
        times: dict[tuple[int, str], float] = {}
        for stage, (forward, backward) in enumerate(self.zero_traffic):
            f, i, w = self.passes[stage].sums
            hidden = self.passes[stage].hidden if split else 0.0
            times[stage, "F"] = f + forward + waits
            times[stage, "B"] = i + w + backward + waits
            times[stage, "I"] = i + hidden + backward + waits
            times[stage, "W"] = w
        return StageCosts(times, 0.0 if waits else message, self._pairs(times))

    def _pairs(self, times: Mapping[tuple[int, str], float]) -> dict[tuple[int, int], float]:
        """Seconds of the pairs of forward and backward, whose messages between experts overlap with computation."""
        seconds = {}
        for first, second in {tuple(a.stage for a in turn) for turn in chain(*self.plan.turns) if len(turn) > 1}:
            exchange = self.passes[first].forward.get("ep", 0.0) + self.passes[second].input_grad.get("ep", 0.0)
            both = times[first, "F"] + times[second, "B"]
            seconds[first, second] = both - exchange + self.clock.exposed(exchange, both - exchange)
        return seconds

    def hidden_exchange(self, rank: int) -> float:
        """Seconds per step of a rank's messages between experts that overlap with computation."""
        costs = self.stage_costs

        def hidden(plan: Plan) -> float:
            pairs = [turn for turn in plan.turns[rank] if len(turn) > 1]
            apart = sum(costs.time(plan, action) for turn in pairs for action in turn)
            return apart - sum(costs.pair_time(plan, *turn) for turn in pairs)

        return self._of_all_micros(hidden)

    @cached_property
    def zero_traffic(self) -> list[tuple[float, float]]:
        """Exposed seconds of ZeRO's gathers and reductions in each forward and each backward, by stage."""
        parallel = self.config.parallel
        clock = self.clock
        stage_units = self._stage_parameters
        exposed = []
        for stage, parameters in enumerate(stage_units):
            f, i, w = self.passes[stage].sums
            forward = backward = 0.0
            if parallel.dp_zero_stage == 3 and not parallel.zero3_keep_after_forward:
                frozen = Parameters(parameters.frozen, parameters.frozen_experts)
                gather = self._sharded(parameters + frozen, clock.bytes)
                backward = gather
                if self.config.optional("dpo") and self.config.optional("lora_rank") is None:
                    # The frozen copy has no backward.
                    backward = self._sharded(parameters, clock.bytes)
                elif self.config.optional("dpo"):
                    gather *= 2
                forward = clock.exposed(gather, f) if parallel.overlap_param_gather else gather
            if parallel.dp_zero_stage >= 2:
                backward += self._sharded(parameters, self.wire_bytes)
            hides = parallel.overlap_grad_reduce or parallel.overlap_param_gather
            exposed.append((forward, clock.exposed(backward, i + w) if hides else backward))
        return exposed

    @cached_property
    def _stage_parameters(self) -> list[Parameters]:
        """Parameters of each stage, from the rank's units in the order of its stages."""
        final = len(self.layers) - 1
        by_stage = []
        ranks = [iter(units) for units in self.units]
        for stage, run in enumerate(self.layers):
            count = len(run) + (stage == 0) + (stage == final)
            units = ranks[self.plan.stage_to_rank[stage]]
            by_stage.append(Parameters.sum([next(units) for _ in range(count)]))
        return by_stage

    @property
    def wire_bytes(self) -> int:
        """Bytes per element of a gradient in a reduction."""
        return 2 if self.config.parallel.reduces_in_bf16 else max(self.clock.bytes, 4)

    def _sharded(self, parameters: Parameters, number: int) -> float:
        """Seconds of an all-gather, or of a reduce-scatter, of parameters over the ranks of their shards."""
        instances = self.config.parallel.num_distributed_optimizer_instances
        duration = 0.0
        for axes, elements in ((("cp", "dp"), parameters.dense), (("edp",), parameters.experts)):
            ring = self.rings.ring(*axes)
            if instances > 1:
                ring = replace(ring, size=ring.size // instances, local=min(ring.local, ring.size // instances))
            duration += ring.gather(number * elements)
        return duration

    @cached_property
    def least_seconds(self) -> float:
        """Busy time of the slowest rank: a lower bound for every schedule."""
        busy = [0.0] * len(self.plan.ranks)
        for stage, rank in enumerate(self.plan.stage_to_rank):
            busy[rank] += sum(self.passes[stage].sums)
        return max(busy) * self.micros

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated plan for ``_simulated_micros`` micro-batches."""
        return simulate(self.plan, self.stage_costs)

    @cached_property
    def makespan(self) -> float:
        """Seconds of all micro-batches."""
        return self._of_all_micros(
            lambda plan: (self.timeline if plan is self.plan else simulate(plan, self.stage_costs)).makespan
        )

    def _of_all_micros(self, seconds: Callable[[Plan], float]) -> float:
        """Extrapolate ``seconds`` of the simulated plan to all micro-batches: each p more of them add the same."""
        simulated = seconds(self.plan)
        left = self.micros - self.plan.num_microbatches
        ranks = len(self.plan.ranks)
        if not left:
            return simulated
        return simulated + left / ranks * (seconds(_plan(self.config, self.plan.num_microbatches + ranks)) - simulated)

    def rank_times(self, rank: int) -> tuple[Seconds, float, float]:
        """Return a rank's seconds for one micro-batch by kind, and its total forward and backward time."""
        stages = [s for s, r in enumerate(self.plan.stage_to_rank) if r == rank]
        split = any(action.kind == "I" for action in self.plan.ranks[rank])
        terms = [
            layer_seconds
            for s in stages
            for layer_seconds in (
                self.passes[s].forward,
                self.passes[s].input_grad,
                self.passes[s].weight_grad,
                {"tp": self.passes[s].hidden * split, "dp": sum(self.zero_traffic[s])},
            )
        ]
        costs = self.stage_costs.times
        forward = sum(costs[s, "F"] for s in stages)
        backward = sum(costs[s, "B"] for s in stages)
        by_kind = total(terms)
        computing = sum(by_kind.values())
        by_kind["pp"] = max(forward + backward - computing, 0.0) if not split else 0.0
        return by_kind, forward, backward

    def gradients(self, rank: int, forward: float, backward: float) -> float:
        """Exposed seconds of gradient reductions and weight gathers per step, excluding those of every micro-batch."""
        parallel = self.config.parallel
        clock = self.clock
        parameters = Parameters.sum(self.units[rank])
        stage = parallel.dp_zero_stage
        exposed = 0.0
        if stage < 2:
            summed = self._sharded(parameters, self.wire_bytes) * (2 if stage == 0 else 1)
            exposed += clock.exposed(summed, backward) if parallel.overlap_grad_reduce else summed
        if stage in (1, 2) or (stage == 3 and parallel.zero3_keep_after_forward):
            gather = self._sharded(parameters, clock.bytes)
            exposed += clock.exposed(gather, forward) if parallel.overlap_param_gather else gather
        instances = parallel.num_distributed_optimizer_instances
        if instances > 1:
            ring = self.rings.ring("dp")
            exposed += 2 * self.wire_bytes * self.shard(rank) / ring.inter_bandwidth
        tied = self.config.model.share_embeddings_and_output_weights
        ends = self.plan.stage_to_rank[0], self.plan.stage_to_rank[-1]
        if tied and ends[0] != ends[1] and rank in ends:
            exposed += self.rings.ring("pp").send(max(clock.bytes, 4) * self.units[ends[0]][0].dense)
        return exposed

    def shard(self, rank: int) -> float:
        """Number of elements updated by a rank."""
        parameters = Parameters.sum(self.units[rank])
        if self.config.parallel.dp_zero_stage == 0:
            return float(parameters.total)
        instances = self.config.parallel.num_distributed_optimizer_instances
        dense = self.rings.ring("cp", "dp").size
        experts = self.rings.ring("edp").size
        return (parameters.dense / dense + parameters.experts / experts) * instances

    def optimizer(self, rank: int) -> float:
        """Seconds of gradient norm, update and zeroing of gradients.

        Of offloaded state, gradients leave during backward, and weights return during the update. With an optimizer for
        hidden matrices all parameters count as such; its matrix products are not counted.
        """
        config = self.config.optimizer
        hardware = self.clock.hardware
        clock = self.clock
        elements = self.shard(rank)
        wide = max(clock.bytes, 4)
        # Gradient, main weight and moments (read and written), and the model weight if it is a separate tensor.
        moments = config.kind_of(hidden=True).moment_bytes(config, wide)
        moved = wide * (1 + 2) + 2 * moments + (clock.bytes if clock.bytes < wide else 0)
        away = config.optimizer_offload_fraction if config.offloads_optimizer else 0.0
        duration = elements * (1 - away) * moved / hardware.memory_bandwidth
        on_disk = config.optimizer_offload_dir is not None
        bandwidth = hardware.disk_bandwidth if on_disk else hardware.host_memory_bandwidth
        duration += away * elements * max(moved / bandwidth, clock.bytes / hardware.host_link)
        unsharded = Parameters.sum(self.units[rank]).total
        zeroed = unsharded if self.config.parallel.dp_zero_stage < 2 else elements
        return duration + wide * (elements + zeroed) / hardware.memory_bandwidth


class LayerTimes:
    """Cached times of each kind of layer; instances for the same model may share ``splits`` and ``kinds``."""

    def __init__(
        self,
        clock: LayerClock,
        splits: dict[tuple[int, int], list[range]] | None = None,
        kinds: list[int] | None = None,
    ) -> None:
        self.clock = clock
        self._splits = {} if splits is None else splits
        self.kinds = layer_kinds(clock.config) if kinds is None else kinds
        self._found: dict[tuple[int, bool, bool], Passes] = {}
        self._ends: dict[bool, Passes] = {}

    def split(self, config: RunConfig, stages: int) -> list[range]:
        """The layers of each stage."""
        key = config.parallel.pipeline_model_parallel_size, stages
        if key not in self._splits:
            self._splits[key] = layers_by_stage(config, self.clock.vocab_size, stages)
        return self._splits[key]

    def layer(self, number: int, *, recomputed: bool, offloaded: bool) -> Passes:
        """Times of one layer."""
        key = self.kinds[number], recomputed, offloaded
        if key not in self._found:
            passes = self.clock.recomputed(number) if recomputed else self.clock.layer(number)
            self._found[key] = Passes.sum([passes, self.clock.offloaded(number)]) if offloaded else passes
        return self._found[key]

    def end(self, *, first: bool) -> Passes:
        """Times of the embedding or of the head."""
        if first not in self._ends:
            self._ends[first] = self.clock.embedding() if first else self.clock.head()
        return self._ends[first]

    def stage(self, config: RunConfig, run: range, number: int, stages: int) -> Passes:
        """Times of a stage: its layers, and on the first and last stage the embedding and the head."""
        model = config.model
        recomputed, _ = recomputed_layers(config, len(run))
        away = model.cpu_offloading_num_layers if model.cpu_offloading else 0
        passes = [
            self.layer(layer, recomputed=position < recomputed, offloaded=position < away and not recomputed)
            for position, layer in enumerate(run)
        ]
        if number == 0:
            passes.append(self.end(first=True))
        if number == stages - 1:
            passes.append(self.end(first=False))
            if model.added_layers:
                passes.append(self.clock.ahead())
        return Passes.sum(passes)


def step_cost(config: RunConfig, world_size: int, hardware: Hardware, vocab_size: int) -> StepCost:
    """Predict the time of a step with the whole global batch. The configuration must be valid for the world size."""
    clock = LayerClock(config, hardware, world_size, vocab_size)
    return cost_of(Pipeline(config, world_size, clock, LayerTimes(clock)))


def cost_of(pipeline: Pipeline) -> StepCost:
    """Return the time of a step of ``pipeline``."""
    config = pipeline.config
    hardware = pipeline.clock.hardware
    times = [pipeline.rank_times(rank) for rank in range(len(pipeline.plan.ranks))]
    gradients = [pipeline.gradients(rank, f, b) for rank, (_, f, b) in enumerate(times)]
    updates = [pipeline.optimizer(rank) for rank in range(len(times))]
    worst = max(range(len(times)), key=lambda rank: sum(times[rank][0].values()))
    by_kind = {category: seconds * pipeline.micros for category, seconds in times[worst][0].items()}
    if pipeline.plan.paired:
        by_kind["ep"] = by_kind.get("ep", 0.0) - pipeline.hidden_exchange(worst)
    busy = sum(by_kind.values())
    ends = max(gradients) + max(updates)
    by_kind |= {"bubble": max(pipeline.makespan - busy, 0.0), "optimizer": max(updates), "other": hardware.step_seconds}
    by_kind["dp"] = by_kind.get("dp", 0.0) + max(gradients)
    batch = config.training.final_batch_size(pipeline.copies)
    tokens = batch * config.data.seq_length
    model_flops = flops_per_token(config.model, config.data.seq_length, pipeline.clock.vocab_size)
    computing = sum(forward + backward for _, forward, backward in times) / len(times) * pipeline.micros
    return StepCost(
        pipeline.makespan + ends + hardware.step_seconds,
        by_kind,
        max(1 - computing / pipeline.makespan, 0.0) if pipeline.makespan else 0.0,
        tokens,
        float(model_flops) * tokens,
        pipeline.world_size,
    )
