"""Estimate of one rank's memory in a world of any size, built on torch's meta device in one process, without data."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch

from megatron_core.config import RunConfig
from megatron_core.config.partition import describe_stages
from megatron_core.config.validate import check, without_data
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import LayoutError, MegatronError
from megatron_core.feature import descriptions
from megatron_core.features.as_megatron.differences import training_differences
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.locations import path_of
from megatron_core.models import GPTModel
from megatron_core.models.build import build_stages
from megatron_core.optimizer.loss_scale import LossScale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.configured import grid_of
from megatron_core.parallel.groups import COMBINATIONS, LocalGroup
from megatron_core.parallel.sharding import spec_of
from megatron_core.planner.context import attention_flops, traffic
from megatron_core.planner.explain import readable_bytes
from megatron_core.planner.footprint import Footprint
from megatron_core.planner.layout import Layout
from megatron_core.planner.parameters import padded_vocabulary, rank_units
from megatron_core.planner.simulate import peak_activations
from megatron_core.schedules.actions import Plan
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.tokenizers import tokenizer_of
from megatron_core.tokenizers.build import ASSUMED_VOCABULARY, vocabulary_or_assumed
from megatron_core.training.plans import Plans
from megatron_core.training.setup import data_parallel_of

META = torch.device("meta")


@dataclass(frozen=True)
class RankEstimate:
    """One rank: its layout, its stages on the meta device and the plan of a step with the full global batch."""

    config: RunConfig
    groups: ParallelGroups
    vocab_size: int
    plan: Plan
    layers: list[range]
    stages: dict[int, GPTModel]
    num_microbatches: int

    @classmethod
    def of(cls, config: RunConfig, world_size: int, rank: int = 0) -> "RankEstimate":
        """Build rank ``rank`` of a world of ``world_size`` ranks with the functions that training uses.

        Errors: ``ConfigError`` if the configuration is invalid for this world, ``LayoutError`` if ``rank`` is outside.
        """
        config = without_data(config)
        check(config, world_size)
        if not 0 <= rank < world_size:
            raise LayoutError(f"rank={rank} is outside a world of {world_size} ranks; legal: 0 to {world_size - 1}")
        copies = config.parallel.data_parallel_size(world_size)
        micros = config.training.final_batch_size(copies) // (config.training.micro_batch_size * copies)
        plan = Plans(config, copies).training(micros)
        groups = ParallelGroups(
            grid_of(config.parallel, world_size, rank, config.num_groups),
            rank,
            outer_groups=config.num_groups,
            ends=(plan.stage_to_rank[0], plan.stage_to_rank[-1]),
            instances=config.parallel.num_distributed_optimizer_instances,
            a2a_size=config.parallel.a2a_size,
        )
        vocab_size = vocabulary_or_assumed(config)
        layers, stages = build_stages(
            config, groups, vocab_size, META, stage_to_rank=plan.stage_to_rank, initialise=False
        )
        return cls(config, groups, vocab_size, plan, layers, stages, micros)

    @cached_property
    def parameters(self) -> int:
        """Number of parameter elements on this rank, including padding of the vocabulary."""
        return sum(p.numel() for stage in self.stages.values() for p in stage.parameters())

    @cached_property
    def model_parameters(self) -> int:
        """Number of parameter elements of the whole model, each counted once."""
        parallel = ModelParallelConfig(device=META, perform_initialization=False)
        config = self.config
        model = GPTModel(config.model, self.vocab_size, config.max_positions, parallel=parallel, tp_group=LocalGroup())
        return sum(prod(spec_of(parameter).global_shape) for parameter in model.parameters())

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameter elements used for one token: of the experts, only the chosen ones count."""
        model = self.config.model.section(MoEConfig)
        matrices = 3 if model.gated_linear_unit else 2
        unused = (model.num_experts or 0) - model.moe_router_topk
        built = [layer for layer in model.expert_layers if layer < model.num_layers + model.distinct_added_layers]
        idle = unused * matrices * model.expert_hidden_size * model.expert_ffn_size * len(built)
        return self.model_parameters - idle

    @cached_property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of weights, gradients and optimizer state in the buffers of training, and of activations by formula;
        ``elsewhere``: bytes of optimizer state in host memory or on disk.

        Building the buffers turns the parameters into views of them; the result is cached.
        """
        data_parallel = data_parallel_of(DataParallel, self.config, self.stages, self.groups, META)
        backend = self.config.model.kernel_backend
        optimizer = Optimizer(data_parallel, self.config.optimizer, self.groups, LossScale(), backend)
        units = rank_units(self.config, self.layers, self.plan.stage_to_rank, self.vocab_size)
        world = self.groups.grid.world_size * self.groups.outer.size()
        formula = Footprint.of(self.config, world, self.plan, self.layers, units, self.vocab_size)
        return {
            **data_parallel.resident_bytes(),
            "optimizer": sum(shard.nbytes for shard in optimizer.shards if not shard.placement.is_offloaded)
            + sum(piece.memory.nbytes for piece in optimizer.joint_state())
            + _bytes_of_groups(self.config, optimizer),
            "elsewhere": sum(shard.nbytes for shard in optimizer.shards if shard.placement.is_offloaded),
            **{category: round(size) for category, size in formula.all_moving[self.groups.index("pp")].items()},
        }


def _bytes_of_groups(config: RunConfig, optimizer: Optimizer) -> int:
    """Bytes of the global weights of groups of replicas and their momentum, which the replicas of a group divide."""
    total = 0
    for shard in optimizer.shards if config.optional("outer_steps") else ():
        bucket = shard.bucket
        group = shard.bucket.dp_group
        size = bucket.weights.numel() // group.size()
        span = slice(group.rank() * size, (group.rank() + 1) * size)
        total += sum(2 * (stop - start) * shard.main.element_size() for _, _, start, stop, _ in bucket.pieces(span))
    return total


def warnings(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each missing input of a training run (data files, tokenizer files, checkpoint), and for a
    teacher."""
    data = config.data
    if (teacher := config.optional("kd_teacher")) is not None:
        yield f"the bytes are without the weights of kd_teacher={teacher}"
    if data.vocab_size is None:
        try:
            tokenizer_of(data)
        except MegatronError as error:
            yield f"a vocabulary of {ASSUMED_VOCABULARY:,} tokens is assumed (--vocab-size overrides it): {error}"
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        prefixes = [path for path in getattr(data, name) if not path.replace(".", "", 1).isdigit()]
        index_files = {path: file for path in prefixes if (file := path_of(f"{path}.idx")) is not None}
        absent = [path for path, file in index_files.items() if not file.is_file()]
        if absent:
            yield f"{name}: there is no {', '.join(f'{path}.idx' for path in absent)} on this machine"
    for name in ("data_args_path", "per_split_data_args_path", "data_phases"):
        path = getattr(data, name)
        if path is not None and not Path(path).is_file():
            yield f"{name}: there is no {path} on this machine"
    load = config.checkpoint.load
    folder = None if load is None else path_of(load)
    if folder is not None and not folder.is_dir():
        ends = "is an error" if config.checkpoint.needs_checkpoint else "starts from scratch"
        yield f"load: there is no folder {load} on this machine; without a checkpoint, training {ends}"


def describe_rank(config: RunConfig, world_size: int, rank: int = 0) -> str:
    """The report of ``--dry-run``: settings, groups, layers, parameters and bytes of one rank."""
    estimate = RankEstimate.of(config, world_size, rank)
    absent = [f"warning: {warning}" for warning in warnings(config)]
    split = config.parallel.context_parallel_size > 1
    sections = (
        _settings(config),
        _groups(estimate),
        _layers(estimate),
        _memory(estimate),
        *([_attention(estimate)] if split else ()),
        "\n".join(
            ["differences from a training of Megatron-LM", *(f"  {line}" for line in training_differences(config))]
        ),
        *(["\n".join(absent)] if absent else ()),
    )
    return "\n\n".join(sections)


def _settings(config: RunConfig) -> str:
    defaults = RunConfig().flat()
    changed = {name: value for name, value in config.flat().items() if value != defaults[name]}
    lines = ["settings that differ from their defaults", *(f"  {name}: {value}" for name, value in changed.items())]
    return "\n".join(lines)


def _groups(estimate: RankEstimate) -> str:
    groups = estimate.groups
    config = estimate.config
    outer = groups.outer.size()
    among = f" in {outer} groups" if outer > 1 else ""
    world = groups.grid.world_size * outer
    layout = Layout.of(config.parallel, config.model.num_layers, world)
    lines = [f"groups of rank {groups.rank} of {world}, layout {layout}{among} {groups.prefix}"]
    names: dict[tuple[int, ...], list[str]] = {}
    for axes in COMBINATIONS:
        names.setdefault(tuple(groups.ranks(axes)), []).append(axes)
    for ranks, same in names.items():
        if len(ranks) > 1:
            lines.append(f"  {' = '.join(same)}: index {ranks.index(groups.rank)} of {len(ranks)}: {_shortened(ranks)}")
    return "\n".join(lines if len(lines) > 1 else [lines[0], "  none of more than one rank"])


def _shortened(ranks: Sequence[int]) -> str:
    """List ``ranks``; if there are more than five, only the first three and the last."""
    few = [*map(str, ranks[:3]), "...", str(ranks[-1])] if len(ranks) > 5 else map(str, ranks)
    return " ".join(few)


def _layers(estimate: RankEstimate) -> str:
    lines = describe_stages(estimate.layers, estimate.plan.stage_to_rank).splitlines()
    return "\n".join(["layers", *(f"  {line}" for line in [*lines, *descriptions(estimate.config)])])


def _memory(estimate: RankEstimate) -> str:
    sizes = dict(estimate.bytes_by_kind)
    elsewhere = sizes.pop("elsewhere")
    has_experts = estimate.config.model.counting_layers[0]
    active = f", of which a token uses {estimate.active_parameters:,}" if has_experts else ""
    padding = padded_vocabulary(estimate.config, estimate.vocab_size) - estimate.vocab_size
    padded = f"; the vocabulary is padded by {padding} tokens, which are not in the total" if padding else ""
    # Peak number of micro-batches whose activations of all its layers this rank holds at once.
    peak = peak_activations(estimate.plan)[estimate.groups.index("pp")]
    notes = {
        "weights": f"{estimate.parameters:,} parameters of {estimate.model_parameters:,}{active}{padded}",
        "optimizer": f"and {readable_bytes(elsewhere)} in the host's memory or on disk" if elsewhere else "",
        "keys": "of other ranks, and their gradients, in the layer with the most",
        "activations": f"by formula, {peak:.3g} of {estimate.num_microbatches} micro-batches held",
    }
    lines = ["memory of this rank"]
    for category, size in (*sizes.items(), ("total", sum(sizes.values()))):
        if not size and (category != "optimizer" or not elsewhere):
            continue
        lines.append(f"  {category:12} {readable_bytes(size):>9}  {notes.get(category, '')}".rstrip())
    return "\n".join(lines)


def _attention(estimate: RankEstimate) -> str:
    """FLOPs and traffic of attention under context parallelism."""
    config = estimate.config
    layers = [layer for stage in estimate.stages for layer in estimate.layers[stage]]
    work = [attention_flops(config, layers, rank) for rank in range(config.parallel.context_parallel_size)]
    work_of_rank = work[estimate.groups.index("cp")]
    most = max(work) * len(work) / max(sum(work), 1.0)
    sent = traffic(config, layers)
    return "\n".join(
        [
            f"attention of this rank's layers in a micro-batch of {config.data.seq_length} tokens, cp_comm_type="
            f"{' '.join(config.value('cp_comm_type'))}",
            f"  work         {work_of_rank:.3g} FLOPs forward; largest rank {most:.3f} times the mean",
            f"  sent         {readable_bytes(sent.forward)} forward, {readable_bytes(sent.backward)} backward",
        ]
    )
