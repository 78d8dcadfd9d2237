"""Peak bytes of each pipeline rank of a layout, by kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.parallel import added_moments, compression_of
from megatron_core.planner import memory
from megatron_core.planner.context import arriving_bytes
from megatron_core.planner.hardware import number_size
from megatron_core.planner.parameters import Parameters, each_layer, layer_kinds, padded_vocabulary
from megatron_core.planner.recurrence import RecurrenceCost
from megatron_core.planner.simulate import peak_activations
from megatron_core.schedules.actions import Plan

MEMORY_KINDS = (
    "weights", "gradients", "optimizer", "compression", "units whole", "activations", "keys", "temporary", "fragments",
)  # fmt: skip
"""In the order of reports. ``compression`` are errors and other state of compressed gradients, ``units whole`` are
unsharded weights and gradients during ZeRO's gathers and reductions, ``keys`` are keys and values of other
context-parallel ranks, ``temporary`` are tensors of the running operation and of recomputed layers, ``fragments`` is
memory lost to fragmentation of the caching allocator."""
FRAGMENTS = 0.05
"""Fragmentation as a share of activations and other temporary memory: the ratio of reserved to allocated memory in
published runs (nanotron's benchmark logs) is 1.00 to 1.06."""


@dataclass(frozen=True)
class Footprint:
    """Memory of the stages of a configuration; ``units`` are the parameters of each pipeline rank's units."""

    config: RunConfig
    world_size: int
    plan: Plan
    layers: Sequence[range]
    units: Sequence[Sequence[Parameters]]
    vocab_size: int
    layer_bytes: dict[int, float]
    """Bytes of activations of each layer."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        world_size: int,
        plan: Plan,
        layers: Sequence[range],
        units: Sequence[Sequence[Parameters]],
        vocab_size: int,
    ) -> "Footprint":
        """Make a footprint; the activations of each kind of layer are computed once."""
        by_layer = each_layer(layer_kinds(config), lambda layer: memory.layer_activations(config, layer))
        return cls(config, world_size, plan, layers, units, vocab_size, dict(enumerate(by_layer)))

    @cached_property
    def stage_sizes(self) -> list[float]:
        """Bytes of activations stored per micro-batch in each stage."""
        final = len(self.layers) - 1
        padded = padded_vocabulary(self.config, self.vocab_size)
        size_of = partial(memory.stage_activations, self.config, padded_vocab_size=padded, by_layer=self.layer_bytes)
        return [size_of(run, first=stage == 0, has_head=stage == final) for stage, run in enumerate(self.layers)]

    @cached_property
    def activations(self) -> tuple[float, ...]:
        """Peak bytes of activations on each pipeline rank."""
        return peak_activations(self.plan, stage_sizes=self.stage_sizes)

    @cached_property
    def transient(self) -> float:
        """Bytes of temporary activations, of recomputed or offloaded layers."""
        return memory.transient_activations(self.config, self.layers, self.layer_bytes)

    def variant(self, config: RunConfig) -> "Footprint":
        """Return the same stages with another ``config``, which differs only in ZeRO, overlap and optimizer offload."""
        other = replace(self, config=config)
        unchanged = ("stage_sizes", "all_moving", "totals", "rank_layers")
        vars(other).update({name: vars(self)[name] for name in unchanged if name in vars(self)})
        return other

    @cached_property
    def totals(self) -> list[Parameters]:
        """The parameters of each pipeline rank."""
        return [Parameters.sum(units) for units in self.units]

    def by_kind(self, rank: int) -> dict[str, float]:
        """Peak bytes of a pipeline rank by kind."""
        state = self.state(rank)
        moving = self.all_moving[rank]
        return state | moving | {"fragments": moving["fragments"] + FRAGMENTS * state["units whole"]}

    @cached_property
    def all_moving(self) -> list[dict[str, float]]:
        """Bytes allocated and freed within a step on each pipeline rank, by kind."""
        return [self._moving(rank) for rank in range(len(self.plan.ranks))]

    def _moving(self, rank: int) -> dict[str, float]:
        run = self.rank_layers[rank]
        working = self.transient + self.temporary(rank)
        if self.plan.stage_to_rank[-1] == rank:  # the head's activations are freed before the layers' backward begins
            working = max(working - self.head_bytes, 0.0)
        sizes = {"activations": self.activations[rank], "keys": arriving_bytes(self.config, run), "temporary": working}
        return sizes | {"fragments": FRAGMENTS * sum(sizes.values())}

    def state(self, rank: int) -> dict[str, float]:
        """Bytes of weights, gradients, optimizer state and temporarily unsharded units, without padding of buckets."""
        parallel = self.config.parallel
        optimizer = self.config.optimizer
        stage = parallel.dp_zero_stage
        instances = parallel.num_distributed_optimizer_instances
        dtype = self.config.training.compute_dtype
        weight = number_size(dtype)
        wide = max(number_size(dtype), 4)
        away = optimizer.optimizer_offload_fraction if optimizer.offloads_optimizer else 0.0
        totals = dict.fromkeys(("weights", "gradients", "optimizer", "compression", "units whole"), 0.0)
        sizes = [max(size // instances, 1) for size in self.shard_sizes]
        for category, bytes_ in self._state_by_kind(rank, sizes).items():
            totals[category] += bytes_ * ((1 - away) if category == "optimizer" else 1)
        if self.config.optional("fp8_format") and stage < 3:
            # Each weight is quantised once in a step, in both memory orders.
            elements = self.totals[rank]
            totals["weights"] += 2.0 * (elements.total + elements.frozen + elements.frozen_experts - elements.outside)
        totals["compression"] = self._compression(rank, wide)
        totals["units whole"] = self._units_whole(rank, weight, wide, sizes) if stage >= 2 else 0.0
        return totals

    def _units_whole(self, rank: int, weight: int, wide: int, sizes: Sequence[int]) -> float:
        """Bytes of the units that are unsharded at once: their gradients, and with ZeRO 3 their weights."""
        parallel = self.config.parallel
        of_frozen = weight * (parallel.dp_zero_stage == 3)
        of_trained = wide + of_frozen
        split, experts_split = (size > 1 for size in sizes)
        unit_sizes = [
            split * (unit.dense * of_trained + unit.frozen * of_frozen)
            + experts_split * (unit.experts * of_trained + unit.frozen_experts * of_frozen)
            for unit in self.units[rank]
        ]
        at_once = 2 if parallel.overlap_grad_reduce or parallel.overlap_param_gather else 1
        return max((sum(unit_sizes[i : i + at_once]) for i in range(len(unit_sizes))), default=0.0)

    def _state_by_kind(self, rank: int, shard_sizes: Sequence[int]) -> dict[str, float]:
        """Bytes by kind, in memory or on disk; weights that ZeRO 3 stores on disk are not counted.

        ``shard_sizes``: numbers of ranks that shard dense parameters and experts.
        """
        config = self.config
        total = self.totals[rank]
        dense, experts = shard_sizes
        totals = dict.fromkeys(("optimizer", "gradients", "weights"), 0.0)
        for elements, size, hidden in (
            (total.dense - total.outside, dense, True),
            (total.outside, dense, False),
            (total.experts - total.expert_biases, experts, True),
            (total.expert_biases, experts, False),
        ):
            for category, bytes_ in self._state_of_an_element(size, hidden=hidden).items():
                totals[category] += elements * bytes_
        if config.optional("outer_steps"):  # global weights and momentum
            wide = max(number_size(config.training.compute_dtype), 4)
            totals["optimizer"] += 2 * wide * (total.dense / dense + total.experts / experts)
        layers = self.rank_layers[rank]
        parallel = config.parallel
        ranks = self.world_size // config.num_groups // parallel.pipeline_model_parallel_size
        of_matrices = memory.matrix_state_elements(config, layers, has_mtp=self.plan.stage_to_rank[-1] == rank)
        totals["optimizer"] += max(number_size(config.training.compute_dtype), 4) * of_matrices / ranks
        for elements, size in ((total.frozen, dense), (total.frozen_experts, experts)):
            shards = size if config.parallel.dp_zero_stage == 3 else 1
            totals["weights"] += elements * number_size(config.training.compute_dtype) / shards
        return totals | ({"weights": 0.0} if config.parallel.offloads_weights else {})

    def _state_of_an_element(self, size: int, *, hidden: bool) -> dict[str, float]:
        """``state_by_kind`` of an element that ``size`` ranks shard, computed once for all pipeline ranks."""
        key = size, hidden
        if key not in self._states:
            config = self.config
            self._states[key] = memory.state_by_kind(
                config.training.compute_dtype,
                size,
                zero_stage=config.parallel.dp_zero_stage,
                optimizer=config.optimizer,
                hidden=hidden,
                added_moments=added_moments(config.parallel),
            )
        return self._states[key]

    @cached_property
    def _states(self) -> dict[tuple[int, bool], dict[str, float]]:
        return {}

    def _compression(self, rank: int, wide: int) -> float:
        """Bytes of compressed gradients at the end of a backward; ``wide``: bytes of a gradient."""
        parallel = self.config.parallel
        total = self.totals[rank]
        compression = compression_of(parallel)
        if compression is None:
            return 0.0
        return sum(
            elements * compression.bytes_per_parameter(wide, size, parallel.dp_zero_stage)
            for elements, size in zip((total.dense, total.experts), self.shard_sizes, strict=True)
            if size > 1
        )

    @property
    def shard_sizes(self) -> tuple[int, int]:
        """Number of ranks that shard dense parameters, and number of ranks that shard experts."""
        parallel = self.config.parallel
        size = self.world_size // self.config.num_groups
        return parallel.data_parallel_size(size) * parallel.context_parallel_size, size // parallel.expert_model_size

    @cached_property
    def head_bytes(self) -> float:
        """Bytes that the output layer and the loss store per micro-batch."""
        padded = padded_vocabulary(self.config, self.vocab_size)
        return memory.stage_activations(self.config, range(0), first=False, has_head=True, padded_vocab_size=padded)

    def temporary(self, rank: int) -> float:
        """Bytes of the running operation: gradients of the widest part of a layer, or of the fused output layer."""
        config = self.config
        model = self.config.model
        n = number_size(config.training.compute_dtype)
        parallel = config.parallel
        tp = parallel.tensor_model_parallel_size
        tokens = self.tokens
        gated = 2 if model.gated_linear_unit else 1
        dense = any(map(model.has_dense_mlp, range(model.num_layers)))
        width = (1 + gated) * model.ffn_size / tp if dense else 0.0
        if model.layers_differ_in_size:
            width = self._widest(rank, (1 + gated) / tp, n * tokens)
        if config.optional("num_experts") is not None:
            experts: Any = model
            rows = experts.moe_router_topk * (experts.expert_hidden_size + (1 + gated) * experts.expert_ffn_size) / tp
            width = max(rows, width)
        size = n * tokens * (width + 4 * model.hidden_size)
        if self.plan.stage_to_rank[-1] == rank and model.fuses_output_layer_with_loss:
            size = max(size, n * tokens * 2 * model.hidden_size)
        recurrent = filter(model.is_recurrent, self.rank_layers[rank])
        return max([size, *(RecurrenceCost.of(config, layer).again for layer in recurrent)])

    def _widest(self, rank: int, share: float, size: float) -> float:
        """Width of the temporary gradients of layers of different sizes, ``share`` of the MLP's width, less the
        activations of later layers, which are freed before; in channels of ``size`` bytes."""
        model = self.config.model
        freed = 0.0
        widest = 0.0
        for layer in reversed(self.rank_layers[rank]):
            ffn_size = model.of_layer(layer).ffn_size if model.has_dense_mlp(layer) else 0
            widest = max(widest, share * ffn_size - freed)
            freed += self.layer_bytes[layer] / size if model.recompute_granularity != "full" else 0.0
        return widest

    @cached_property
    def rank_layers(self) -> list[list[int]]:
        """The layers of all stages of each pipeline rank."""
        by_rank: list[list[int]] = [[] for _ in self.plan.ranks]
        for rank, run in zip(self.plan.stage_to_rank, self.layers, strict=False):  # a mean over stages has no layers
            by_rank[rank] += run
        return by_rank

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a rank."""
        config = self.config
        return config.data.seq_length * config.training.micro_batch_size / config.parallel.context_parallel_size

    def on_host(self, rank: int) -> float:
        """Bytes in host memory: offloaded optimizer state and activations."""
        optimizer = self.config.optimizer
        stored = 0.0
        if optimizer.offloads_optimizer and optimizer.optimizer_offload_dir is None:
            stored = self._state_by_kind(rank, self.shard_sizes)["optimizer"] * optimizer.optimizer_offload_fraction
        sizes = [memory.offloaded_activations(self.config, run) for run in self.layers]
        return stored + (peak_activations(self.plan, stage_sizes=sizes)[rank] if any(sizes) else 0.0)

    def worst(self) -> tuple[int, dict[str, float]]:
        """The pipeline rank with the highest peak, and its bytes by kind."""
        peaks = [self.by_kind(rank) for rank in range(len(self.plan.ranks))]
        rank = max(range(len(peaks)), key=lambda r: sum(peaks[r].values()))
        return rank, peaks[rank]
