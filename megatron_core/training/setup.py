"""Setup of a training run from a configuration."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from megatron_core.checkpoint import TensorBox
from megatron_core.checkpoint.state_reader import StateReader
from megatron_core.config import OptimizerConfig, RunConfig
from megatron_core.config.parallel import compression_of
from megatron_core.config.validate import check
from megatron_core.data_parallel import BucketMemory, DataParallel, DataParallelSettings, Initialise
from megatron_core.data_parallel.settings import BucketRule, in_order
from megatron_core.datasets import Dataset, Splits
from megatron_core.datasets.loader import Batch, BatchLoader, packing_of
from megatron_core.errors import ConfigError
from megatron_core.feature import load_hook, used_features
from megatron_core.models import GPTModel
from megatron_core.models.build import arithmetic_of, build_stages
from megatron_core.optimizer.loss_scale import make_loss_scale
from megatron_core.optimizer.lr_schedule import LearningRateSchedule
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups, World
from megatron_core.parallel.configured import make_groups
from megatron_core.parallel.micro_batch import MicroBatch, SequenceSplit
from megatron_core.pipeline_parallel.messages import MessageFormat
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.tokenizers import Tokenizer, tokenizer_of
from megatron_core.tokenizers.build import vocabulary_size
from megatron_core.training.data import DatasetsProvider, compare_data, make_splits
from megatron_core.training.driver import Trainable
from megatron_core.training.initial_weights import InitialWeights
from megatron_core.training.loading import counters, load_intact, load_state
from megatron_core.training.objective import Objective, build_objective
from megatron_core.training.parts import Attempts, Evaluation, RunPart, build_evaluations, build_parts
from megatron_core.training.plans import Plans, StepSize
from megatron_core.training.process import check_kernels, set_process_switches
from megatron_core.training.saving import CheckpointSaver, make_saver
from megatron_core.training.state import TrainState, open_checkpoint
from megatron_core.transformer.layer_spec import LayerSpecs, auxiliary_loss_names, layer_spec

Part = TypeVar("Part", bound=RunPart)
Wrapper = TypeVar("Wrapper", bound=DataParallel)


@dataclass(kw_only=True)
class Run(Trainable):
    """A GPT training run: the objects needed for its steps, its data and its counters."""

    config: RunConfig
    world: World
    vocab_size: int
    tokenizer: Tokenizer | None
    layers: list[range]
    """The layers of every stage of the whole model."""
    stages: dict[int, GPTModel]
    """This rank's stages by number."""
    auxiliary_loss_names: tuple[str, ...]
    """Names of the layers' auxiliary losses, equal on all ranks."""
    layer_specs: LayerSpecs = layer_spec
    """The function that has chosen the parts of each layer."""
    plans: Plans
    splits: Splits
    evaluations: tuple[Evaluation, ...]
    """Evaluations of features, in addition to the validation data."""
    loaded: bool = False
    """Whether a checkpoint was loaded."""
    state: TrainState = field(default_factory=TrainState)
    total_iterations: int = field(init=False)
    """Steps of the whole training, including the steps before a resume."""
    schedule: LearningRateSchedule = field(init=False)
    decoupled_schedule: LearningRateSchedule | None = field(init=False)
    """Schedule of word embedding and output layer, if it is separate."""
    bad_steps: list[int] = field(default_factory=list)
    """Iterations of the bad steps since the last good one; no checkpoint is written until a step is good again."""
    stop_reason: str = ""
    """This rank's reason to stop, or ""; any rank's reason ends the run with a checkpoint after the current step, or
    after the next one if it is given between steps."""
    event_fields: list[Callable[[Any], Mapping[str, Any]]] = field(default_factory=list)
    """Functions of callbacks from the ``StepResult`` to further fields of the step's event."""
    attempts: Attempts = field(default_factory=Attempts)
    """How steps are computed: once, or repeatedly to find wrong results."""
    parts: tuple[RunPart, ...] = field(init=False)
    """The objects of the features that this run uses."""
    objective: Objective = field(init=False)
    """The loss."""
    train_loader: BatchLoader = field(init=False)
    saver: CheckpointSaver = field(init=False)

    def __post_init__(self) -> None:
        """Create the parts of features, the checkpoint saver, the loss, and the loader of training data, if any."""
        self.parts = build_parts(self.config, self)
        self.after_gradients = self._tell_parts
        self.saver = make_saver(
            self.config,
            self.data_parallel,
            self.optimizer,
            vocab_size=self.vocab_size,
            tokenizer=self.tokenizer,
            parts=self.parts,
        )
        self.objective = build_objective(self.config, self)
        if self.splits.train is not None:
            self.train_loader = self.loader(self.splits.train)

    def begin(self, checkpoint: StateReader | None) -> None:
        """Load the state of a checkpoint, if there is one, and derive the remaining steps and their rates."""
        config = self.config
        self.loaded = checkpoint is not None
        self.state = load_intact(config, checkpoint, self.world.device, partial(self.load, config))
        # After the counters: changes of files matter from the consumed samples on.
        self.state.data = compare_data(config, self.state, self.world)
        done = self.state.iteration, self.state.consumed_samples
        remaining = config.training.steps_left(self.groups.replicas, *done, config.data.seq_length)
        self.total_iterations = self.state.iteration + remaining
        self.schedule = learning_rate_schedule(config, config.optimizer, self.total_iterations)
        self.decoupled_schedule = None
        if (decoupled := config.optimizer.decoupled()) is not None:
            self.decoupled_schedule = learning_rate_schedule(config, decoupled, self.total_iterations)

    def load(self, config: RunConfig, reader: StateReader | None) -> TrainState:
        """Load the model, the optimizer and the parts of features; return the counters, 0 without a checkpoint."""
        if reader is None:
            return TrainState()
        if any(run_part.load(config, reader) for run_part in self.parts):
            return counters(reader)
        state = load_state(config, reader, self.data_parallel, self.optimizer, self._pieces_of_features)
        for run_part in self.parts:
            run_part.after_load(config, reader)
        return state

    def _tell_parts(self) -> None:
        for run_part in self.parts:
            run_part.after_gradients()

    def _pieces_of_features(self, reader: StateReader) -> Iterator[TensorBox]:
        """The pieces of features to load together with model and optimizer."""
        for run_part in self.parts:
            yield from run_part.pieces_to_load(reader)

    def part(self, part_class: type[Part]) -> Part | None:
        """The part of a feature, by its class; None if the run does not use the feature."""
        return next((run_part for run_part in self.parts if isinstance(run_part, part_class)), None)

    def state_bytes(self) -> dict[str, int]:
        """Bytes of this rank's weights, gradients and optimizer state, and of temporarily gathered units."""
        state = [tensor for _, named in self.optimizer.tensors() for tensor in named.values()]
        state += [piece.memory for piece in self.optimizer.joint_state()]
        of_parts = sum(run_part.nbytes for run_part in self.parts)
        return self.data_parallel.resident_bytes() | {"optimizer": sum(tensor.nbytes for tensor in state) + of_parts}

    def step_after(self, consumed_samples: int) -> StepSize:
        """The size of the step after ``consumed_samples`` samples."""
        return StepSize.at(self.config, self.groups.replicas, consumed_samples)

    def first_sample(self, size: StepSize) -> int:
        """The first sample of a step for this rank's outer group: group g of G has the g-th G-th of the batch."""
        return size.consumed_samples + self.groups.outer.rank() * size.batch_size // self.groups.outer.size()

    def micro_batches(self, batches: list[Batch]) -> list[MicroBatch]:
        """This rank's part of its loader's batches, on its device."""
        if (divider := self._divider) is not None:
            return divider.micro_batches(batches)
        depth = self.config.model.added_layers
        return [MicroBatch.of(batch, self.split, self.world.device, later=depth) for batch in batches]

    @property
    def _divider(self) -> RunPart | None:
        return next((run_part for run_part in self.parts if run_part.divides_batches), None)

    @property
    def layout(self) -> str:
        """Short description of the layout, such as ``tp2 pp2 v2 sp``."""
        plan_name = self.config.parallel.plan_name
        layout = self.config.parallel.layout_words(self.config.model.num_layers, self.world.size)
        layout += f" in {self.groups.outer.size()} groups" if self.groups.outer.size() > 1 else ""
        return f"{layout} plan {plan_name}" if plan_name else layout

    def loader(self, dataset: Dataset, shift: int = 0) -> BatchLoader:
        """Return a loader of the batches of ``dataset`` of the data-parallel rank ``shift`` places after this one, or
        of all data-parallel ranks together for a part that divides them."""
        ranks = self.groups.size("dp")
        joined = 1 if self._divider is None else ranks
        return BatchLoader(
            dataset,
            self.config.training.micro_batch_size * joined,
            (self.groups.index("dp") + shift) % ranks if joined == 1 else 0,
            ranks // joined,
            self.vocab_size,
            packing_of(self.config.data, self.tokenizer),
            num_workers=self.config.data.num_workers,
            pin_memory=self.world.device.type == "cuda",
        )


def message_format(config: RunConfig, split: SequenceSplit, device: torch.device) -> MessageFormat:
    """Format of messages between stages: ``[s/cp, b, stream_size]``; ``s/cp/tp`` with sequence parallelism."""
    length = split.message_length(config.data.seq_length)
    shape = (length, config.training.micro_batch_size, config.model.stream_size)
    return MessageFormat(shape, getattr(torch, config.residual_dtype), device)


def data_parallel_of(
    wrapper: type[Wrapper],
    config: RunConfig,
    stages: Mapping[int, nn.Module],
    groups: ParallelGroups,
    device: torch.device,
    initialise: Initialise | None = None,
    *,
    units: Mapping[int, list[list[nn.Module]]] | None = None,
    rule_of: BucketRule | None = None,
) -> Wrapper:
    """Build the gradient buckets of a rank's stages according to the configuration.

    ``rule_of`` replaces the rule of the optimizer by which buckets are filled; ``wrapper``: the class of the result.
    """
    parallel = config.parallel
    compression = compression_of(parallel)
    rule = config.optimizer.bucket_rule(parallel.dp_zero_stage)
    settings = DataParallelSettings(
        zero_stage=parallel.dp_zero_stage,
        bucket_size=parallel.ddp_bucket_size,
        rule_of=rule_of or (in_order if rule is None else load_hook(rule)),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        keep_after_forward=parallel.zero3_keep_after_forward,
        persistence_threshold=parallel.zero3_param_persistence_threshold,
        wire_dtype=torch.bfloat16 if parallel.reduces_in_bf16 else None,
        sums_wide=parallel.ddp_reduce_scatter_with_fp32_accumulation,
        arithmetic=arithmetic_of(config, groups.context.whole, groups.size("dp")),
    )
    memory = BucketMemory(device, initialise)
    for hook in (feature.memory for feature in used_features(config) if feature.memory is not None):
        memory = load_hook(hook)(memory, config, groups.rank)
    compressor = None if compression is None else load_hook(compression.build)(config)
    return wrapper(stages, groups, settings, memory=memory, compressor=compressor, units=units)


def _optimizer_of(config: RunConfig, data_parallel: DataParallel, groups: ParallelGroups) -> Optimizer:
    model, seed = config.model, config.training.seed
    scale = make_loss_scale(config.optimizer, getattr(torch, config.training.compute_dtype))
    return Optimizer(
        data_parallel, config.optimizer, groups, scale, model.kernel_backend, seed, width=model.width_ratio
    )


def learning_rate_schedule(
    config: RunConfig, optimizer: OptimizerConfig, total_iterations: int
) -> LearningRateSchedule:
    """The schedule of ``optimizer`` in a training of ``total_iterations`` steps, by steps or by samples."""
    by_samples = config.schedules_by_samples
    total = config.training.train_samples if by_samples else total_iterations
    return LearningRateSchedule(optimizer, total or total_iterations, by_samples=by_samples)


def _read_data(
    config: RunConfig,
    groups: ParallelGroups,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    provider: DatasetsProvider | None,
) -> tuple[Splits, tuple[Evaluation, ...]]:
    """Open the data sets, and the evaluations of features; ``ConfigError`` if there is nothing to train or evaluate."""
    splits = make_splits(config, groups.replicas, tokenizer, vocab_size, provider)
    evaluations = build_evaluations(config, tokenizer)
    skip_train = config.training.skip_train
    if skip_train and not (splits.of("validation") or splits.of("test") or evaluations):
        raise ConfigError(
            "skip_train=True: there is no data to evaluate on; give --valid-data-path or --test-data-path"
        )
    if splits.train is None and not skip_train:
        raise ConfigError("there is no data to train on; give --data-path or --train-data-path")
    return splits, evaluations


def _freeze_or_convert(config: RunConfig, stages: Mapping[int, GPTModel], world: World) -> None:
    """Freeze the stages of a run that does not train, so that it allocates no gradients and moments; else convert their
    layers, if configured. Rank 0 prints which parts of layers stay as they were."""
    if config.training.skip_train:
        for stage in stages.values():
            stage.requires_grad_(False)
        return
    for hook in (feature.convert_layers for feature in used_features(config) if feature.convert_layers is not None):
        convert, unchanged = load_hook(hook), ""
        for stage in stages.values():
            unchanged = convert(config, stage.decoder, world.device)
        if unchanged and world.rank == 0:
            print(unchanged, flush=True)


def set_up(
    config: RunConfig,
    world: World,
    datasets_provider: DatasetsProvider | None = None,
    layer_specs: LayerSpecs = layer_spec,
    copy: StateReader | None = None,
    *,
    reads_data: bool = True,
) -> Run:
    """Build plans, groups, data, model and optimizer, and load the configured checkpoint.

    ``datasets_provider`` builds the data sets for ``dataloader_type=external``; ``layer_specs`` chooses the parts of
    each layer; ``copy``: state of this rank to load instead of the checkpoint; ``reads_data=False``: the
    caller passes the micro-batches of each step to ``train_on_batches``."""
    set_process_switches(config)
    # The checkpoint, which may replace settings.
    checkpoint, loaded = open_checkpoint(config, world.device, hash_later=True) if copy is None else (copy, config)
    # Settings from the checkpoint may contradict this layout, which was checked with those of the command line.
    if loaded != config:
        check(loaded, world.size)
        config = loaded
    check_kernels(config, world.device)
    # Plans, process groups and data.
    parallel = config.parallel
    plans = Plans(config, parallel.data_parallel_size(world.size))
    groups = make_groups(parallel, world, ends=plans.ends, outer_groups=config.num_groups)
    split = SequenceSplit.of(groups, sequence_parallel=parallel.sequence_parallel)
    tokenizer = tokenizer_of(config.data)
    vocab_size = vocabulary_size(config, tokenizer)
    splits = Splits()
    evaluations: tuple[Evaluation, ...] = ()
    if reads_data:
        splits, evaluations = _read_data(config, groups, tokenizer, vocab_size, datasets_provider)
    # This rank's stages, their gradients and the optimizer.
    initial = InitialWeights(config, checkpoint, world.device)
    # A rank's stages may not fit on its device before they are sharded: each unit is drawn and sharded in turn.
    deferred = parallel.dp_zero_stage == 3
    layers, stages = build_stages(
        config,
        groups,
        vocab_size,
        world.device,
        stage_to_rank=plans.stage_to_rank,
        initialise=initial.are_drawn,
        deferred=deferred,
        layer_specs=layer_specs,
    )
    _freeze_or_convert(config, stages, world)
    initial.draw_missing(stages.values())
    data_parallel = data_parallel_of(
        DataParallel, config, stages, groups, world.device, initial.draw if deferred else None
    )
    initial.load(data_parallel, stages)
    p2p = PipelineP2P(groups)
    p2p.warm_up(world.device, plans.stage_to_rank)
    run = Run(
        config=config,
        world=world,
        groups=groups,
        split=split,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        layers=layers,
        stages=stages,
        auxiliary_loss_names=auxiliary_loss_names(config.model, layer_specs),
        layer_specs=layer_specs,
        plans=plans,
        p2p=p2p,
        overlap_p2p=parallel.overlap_p2p_communication,
        message=message_format(config, split, world.device),
        data_parallel=data_parallel,
        optimizer=_optimizer_of(config, data_parallel, groups),
        # Without the output layer: deferring its weight gradient would keep a gradient of the size of the logits.
        deferrable=[parameter for stage in stages.values() for parameter in stage.decoder.parameters()],
        splits=splits,
        evaluations=evaluations,
    )
    # The state of the checkpoint, and the remaining steps.
    run.begin(checkpoint)
    return run
