"""The engine of a model in pipeline stages: whole steps by a schedule, through ``take_step``."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.any_model.activations import save_memory
from megatron_core.any_model.arguments import check_batches
from megatron_core.any_model.context import ContextParallel
from megatron_core.any_model.context_trial import SplitTrial
from megatron_core.any_model.cut import ModelCut
from megatron_core.any_model.data import evaluating, kind_of, loss_of, model_arguments
from megatron_core.any_model.dtype import refuse_other_dtypes
from megatron_core.any_model.engine import Engine, LossFunction
from megatron_core.any_model.fp8 import histories_of, multiply_in_fp8
from megatron_core.any_model.layers import PipelineModule
from megatron_core.any_model.messages import StructuredMessages, flatten
from megatron_core.any_model.module import LocalInitialisation, cast_module, check_same_module, find_units
from megatron_core.any_model.monitoring import StepReport
from megatron_core.any_model.optimizer import Groups, check_trained, groups_of
from megatron_core.any_model.prepare import Choices, Prepared, compile_units, equalize_and_split
from megatron_core.any_model.stages import Staged, equalize, mark_tied, tied_sets
from megatron_core.any_model.tensor import check_tensor_plan, split_model
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, DataError, LayoutError, MegatronError
from megatron_core.features.compilation.settings import CompilationConfig
from megatron_core.features.fp8.amax_history import update_of
from megatron_core.parallel.collectives import all_reduce_, broadcast_
from megatron_core.parallel.configured import make_groups
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.micro_batch import SequenceSplit
from megatron_core.parallel.texts import gather_from_all_ranks, gather_strings, raising_on_all_ranks
from megatron_core.parallel.world import World
from megatron_core.pipeline_parallel.executor import ForwardStep
from megatron_core.pipeline_parallel.messages import Message
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.schedules.actions import Action
from megatron_core.training.driver import StepHooks, StepRates, StepWork, Trainable, run_plan, sum_of, take_step
from megatron_core.training.plans import Plans


class PipelineEngine(Engine):
    """Trains ``module`` in pipeline stages: a ``PipelineModule``, or any model that ``ModelCut`` can cut.

    ``train_batch`` and ``eval_batch`` run whole batches; ``forward``, ``backward`` and ``step`` do not exist, because
    the micro-batches of a step are interleaved by the schedule.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RunConfig,
        world: World,
        *,
        partition_method: str | Sequence[int] = "parameters",
        head_modules: Sequence[str] = (),
        has_dtype: bool = True,
        **options: Any,
    ) -> None:
        """``has_dtype``: whether the settings choose the dtype, so that it need not be that of the layers."""
        self._partition_method = partition_method
        self._head_modules = head_modules
        self._has_dtype = has_dtype
        super().__init__(module, config, world, **options)
        parallel = config.parallel
        device = world.device
        p2p = PipelineP2P(self.groups)
        p2p.warm_up(device, self.plans.stage_to_rank)
        self._known: set[str] = set()
        """Kinds of micro-batches that any rank has had."""
        self._structures: dict[Any, Any] = {}
        self._trainable = Trainable(
            groups=self.groups,
            split=SequenceSplit.of(self.groups, sequence_parallel=False),
            data_parallel=self.data_parallel,
            optimizer=self._sharded,
            after_gradients=update_of(self.fp8),
            p2p=p2p,
            message=StructuredMessages(device, (), False, self._structures),
            deferrable=[*self.staged.places],
            overlap_p2p=parallel.overlap_p2p_communication,
        )

    def _prepare(self, choices: Choices) -> Prepared:
        config = self.config
        module = self.module
        if choices.keeps_all:
            raise ConfigError(
                f"optimizer={config.optimizer.optimizer} of your own with pipeline stages: each rank updates its own "
                "stages; use AdamW, Adam, SGD, or an optimizer of config"
            )
        size = config.parallel.context_parallel_size
        if size > 1 and isinstance(module, PipelineModule):
            raise ConfigError(
                f"context_parallel_size={size} with a PipelineModule is not supported: its layers and loss_fn take no "
                "positions and shifted labels; set it to 1, or give the whole model to initialize"
            )
        if isinstance(module, PipelineModule) and config.model.recompute_granularity:
            raise ConfigError("recompute_granularity with a PipelineModule: use its recompute_interval")
        self.plans = Plans(config, config.parallel.data_parallel_size(self.world.size))
        stage_to_rank = self.plans.stage_to_rank
        self.groups = groups = make_groups(config.parallel, self.world, ends=(stage_to_rank[0], stage_to_rank[-1]))
        self.staged: Staged
        if isinstance(module, PipelineModule):
            if groups.size("ep") > 1:
                raise ConfigError(
                    f"expert_model_parallel_size={groups.size('ep')} with a PipelineModule is not supported: each "
                    "stage constructs its layers itself; set it to 1, or give the whole model to initialize"
                )
            self.staged = module
            param_groups, local = self._place_layers(module, groups, choices)
        else:
            self.staged, param_groups, local = self._cut_model(module, groups, choices)
        mark_tied(self.staged.places, stage_to_rank, groups)
        self.stages, units = self.staged.make_stages()
        if choices.unit_classes is not None:
            units = {number: find_units(stage, choices.unit_classes) for number, stage in self.stages.items()}
        all_units = [modules for units_of_stage in units.values() for modules in units_of_stage]
        compile_units(all_units, config.section(CompilationConfig))
        save_memory(module, [inner for modules in all_units for inner in modules], config.model)
        places = self.staged.places
        local_groups = [{**group, "params": [p for p in group["params"] if p in places]} for group in param_groups]
        fp8 = histories_of(module, config, groups, self.world.device)
        context = self.staged.context if isinstance(self.staged, ModelCut) else None
        return Prepared(groups, dict(self.stages), units, local_groups, local, fp8, context)

    def _place_layers(
        self, module: PipelineModule, groups: ParallelGroups, choices: Choices
    ) -> tuple[Groups, LocalInitialisation]:
        """Construct this rank's layers of a ``PipelineModule``, equal on the ranks that share them."""
        config = self.config
        stage_to_rank = self.plans.stage_to_rank
        bounds = module.bounds or module.divide(len(stage_to_rank))  # DeepSpeed's constructor places the layers itself
        by_rank = gather_from_all_ranks(
            json.dumps([module.class_names, [list(run) for run in bounds]]), self.world.device
        )
        if len(set(by_rank)) > 1:
            other = next(rank for rank, text in enumerate(by_rank) if text != by_rank[0])
            raise LayoutError(
                f"the PipelineModule differs between ranks: rank 0 has the layers and stages {by_rank[0]}, and rank "
                f"{other} has {by_rank[other]}; construct the same on every rank"
            )
        plan = module.plan_of_names(groups.size("tp"))
        if not module.bounds:
            module.place(bounds, [stage for stage, rank in enumerate(stage_to_rank) if rank == groups.index("pp")])
        groups.tie(tied_sets(module.uses, stage_to_rank))
        with raising_on_all_ranks(self.world.device):
            if not self._has_dtype and config.training.compute_dtype == "float32":
                refuse_other_dtypes(module)
        cast_module(module, config, self.world.device)
        local = LocalInitialisation(module, config.training.seed, self.world.device, choices.initialise)
        equalize(module.places, module.buffers(), stage_to_rank, groups)
        if plan is not None:
            built = dict(module.named_modules())
            own_plan = {name: style for name, style in plan.items() if name in built}
            if groups.size("tp") == 1:
                check_tensor_plan(module, groups.group("tp"), own_plan)
            else:
                split_model(module, groups.group("tp"), plan=own_plan)
                torch.manual_seed(config.training.seed + groups.index("dp"))
        inside = [[child] for layer in module.layers_here() for child in layer.children()]
        multiply_in_fp8(module, inside, config, groups, self.world.device)
        if not any(parameter.requires_grad for parameter in module.parameters()):  # a stage of functions alone
            optimizer = config.optimizer
            rates = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, "eps": optimizer.adam_eps}
            return [{**rates, "params": []}], local
        return groups_of(module, config.optimizer, choices.model_parameters), local

    def _cut_model(
        self, module: nn.Module, groups: ParallelGroups, choices: Choices
    ) -> tuple[ModelCut, Groups, LocalInitialisation]:
        """Cut a whole model into stages, and keep those of this rank."""
        config = self.config
        device = self.world.device
        stage_to_rank = self.plans.stage_to_rank
        check_same_module(module, device)
        with raising_on_all_ranks(device):
            param_groups = groups_of(module, config.optimizer, choices.model_parameters)
        local = LocalInitialisation(module, config.training.seed, device, choices.initialise)
        is_split = any(groups.size(axis) > 1 for axis in ("tp", "ep", "cp"))
        if is_split:  # splits are chosen from the whole model
            cast_module(module, config, device)
            equalize_and_split(module, groups, config.training.seed, device)
        multiply_in_fp8(module, find_units(module, choices.unit_classes), config, groups, device)
        context = ContextParallel(module, config, groups) if groups.size("cp") > 1 else None
        cut = ModelCut(module, stage_to_rank, self._partition_method, self._head_modules, context)
        groups.tie(tied_sets({holder.stages for holder in cut.all_places.values()}, stage_to_rank))
        cut.keep(groups.index("pp"), getattr(torch, config.training.compute_dtype), device)
        if not is_split:
            cast_module(module, config, device)
            equalize(cut.places, module.buffers(), stage_to_rank, groups)
        return cut, param_groups, local

    # Whole steps.

    def train_batch(self, batches: Iterator[Any] | None, loss_function: LossFunction | None = None) -> StepReport:
        """Take one optimizer step with the next ``gradient_accumulation_steps`` micro-batches of ``batches``.

        ``loss_function(output, batch)`` returns the mean loss of a micro-batch, by default the ``loss_fn`` of a
        ``PipelineModule``, or the loss in the model's output. Each rank passes the micro-batches of its data-parallel
        index; with a ``PipelineModule`` only the first and the last stage read them, and other ranks may pass None. All
        ranks call it together. Errors: ``StopIteration`` if the data of all ranks end, ``DataError`` if those of some.
        """
        check_trained(self.module, self._trained)
        self.whole.check_unchanged()
        self.monitor.begin(self.state.iteration)
        count = self.gradient_accumulation_steps
        micros, pipeline = self._load(batches, count)
        rate = self._set_rates()
        context = self._failing_together if pipeline.message.posts_late else nullcontext
        work = StepWork(
            self.plans.training(count),
            self._forward_step(micros, loss_function, pipeline.message),
            # The ranks of a sequence have one loss, which the first of them counts.
            torch.full((), count * self._counts_loss, dtype=torch.float64, device=self.world.device),
        )
        outcome = take_step(
            pipeline,
            work,
            StepRates(rate),
            hooks=StepHooks(around_plan=context, before_update=self.before_update, is_bad=self._is_bad),
        )
        return self._advance(outcome.loss, outcome.grad_norm, rate, skipped=outcome.skipped)

    @property
    def _counts_loss(self) -> bool:
        return self.groups.index("cp") == 0

    def _is_bad(self, loss: float, norm: float) -> bool:
        self._refuse_bad(loss, norm)
        return False

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Any] | None, loss_function: LossFunction | None = None) -> float:
        """Return the mean loss of the next ``gradient_accumulation_steps`` micro-batches of all ranks."""
        count = self.gradient_accumulation_steps
        with evaluating(self.module):
            micros, pipeline = self._load(batches, count)
            forward = self._forward_step(micros, loss_function, pipeline.message)
            with self._failing_together(None) if pipeline.message.posts_late else nullcontext():
                losses = run_plan(pipeline, self.plans.evaluation(count), forward)
        total = sum_of(pipeline, losses)
        all_reduce_(total, self.groups.group(WORLD))
        return float(total) / (count * self.groups.size("dp"))

    def _load(self, batches: Iterator[Any] | None, count: int) -> tuple[list[Any], Trainable]:
        """Read micro-batches, and agree on their kinds in each pipeline."""
        micros: list[Any] = []
        if batches is not None:
            check_batches(batches)
        for batch in batches if batches is not None else ():
            micros.append(self._in_compute_dtype(batch))
            if len(micros) == count:
                break
        labels = None if batches is None else [f"{self.module.training:d} {kind_of(batch)}" for batch in micros]
        by_rank = [json.loads(text) for text in gather_from_all_ranks(json.dumps(labels), self.world.device)]
        ended = [rank for rank, kinds in enumerate(by_rank) if kinds is not None and len(kinds) < count]
        if ended and len(ended) == sum(kinds is not None for kinds in by_rank):
            raise StopIteration
        if ended:
            raise DataError(
                f"the data of rank {ended[0]} end after {len(by_rank[ended[0]])} of the {count} micro-batches of a "
                "step, but those of other ranks do not; give every rank the same number"
            )
        ranks = self.groups.ranks("pp")
        read = {rank: by_rank[rank] for rank in ranks if by_rank[rank] is not None}
        stage_to_rank = self.plans.stage_to_rank
        needed = ranks if isinstance(self.staged, ModelCut) else [ranks[stage_to_rank[0]], ranks[stage_to_rank[-1]]]
        if any(rank not in read for rank in needed):
            raise DataError(
                f"rank {next(rank for rank in needed if rank not in read)} has no batches, but its stage reads them; "
                "pass an iterator of micro-batches"
            )
        kinds = read[needed[0]]
        other = next((rank for rank in read if read[rank] != kinds), None)
        if other is not None:
            raise DataError(
                f"ranks {needed[0]} and {other} are stages of one pipeline, but their batches have different shapes; "
                "give all stages the same micro-batches"
            )
        everything = {label for kinds in by_rank for label in kinds or ()}
        is_new = not self._known.issuperset(everything)
        self._known |= everything
        if isinstance(self.staged, ModelCut) and self.context is not None and not self.context.is_proven:
            self._prove_split(self.context, self.staged, micros[0])
        message = StructuredMessages(self.world.device, kinds, is_new, self._structures)
        return micros, replace(self._trainable, message=message, overlap_p2p=self._trainable.overlap_p2p or is_new)

    @torch.no_grad()
    def _prove_split(self, context: ContextParallel, cut: ModelCut, batch: Any) -> None:
        """Compare each stage on whole and on split sequences; the next one gets its output for whole ones."""
        trial = SplitTrial(context, *model_arguments(self.module, batch))
        message = StructuredMessages(self.world.device, ["trial"], True, {})
        pipeline = replace(self._trainable, message=message, overlap_p2p=True)

        def forward(stage: int, micro: int, tensors: Message | None) -> Message:
            output = trial.compare(partial(cut.call, stage), message.received(stage, micro, tensors))
            if stage == len(self.plans.stage_to_rank) - 1:
                return torch.zeros((), device=self.world.device)
            structure, sent = flatten(output)
            message.learn(Action(stage, "F", micro), structure)
            return sent

        with self._failing_together(None):
            run_plan(pipeline, self.plans.evaluation(1), forward)
        trial.finish(gather_from_all_ranks(trial.fault, self.world.device))

    @contextmanager
    def _failing_together(self, listener: Any) -> Iterator[Any]:
        """Raise an error of one rank in the context, the first step with new shapes, on all ranks."""
        failure: Exception | None = None
        try:
            yield listener
        except Exception as error:
            failure = error
        by_rank = gather_from_all_ranks(
            "" if failure is None else str(failure) or type(failure).__name__, self.world.device
        )
        if failure is not None:
            raise failure
        if any(by_rank):
            raise MegatronError(next(text for text in by_rank if text))

    def _forward_step(self, micros: list[Any], loss_function: LossFunction | None, message: Any) -> ForwardStep:
        """Return the forward function of a stage: its output is a message, or on the last stage the loss."""
        final = len(self.plans.stage_to_rank) - 1

        def forward(stage: int, micro: int, tensors: Message | None) -> Message:
            batch = micros[micro] if micros else None
            received = message.received(stage, micro, tensors)
            if isinstance(self.staged, ModelCut):
                self.staged.checks_values = message.posts_late
            output = self.stages[stage](batch, received)
            if stage == final:
                return self._loss_in(output, batch, loss_function)
            structure, sent = flatten(output)
            message.learn(Action(stage, "F", micro), structure)
            return sent

        return forward

    def _loss_in(self, output: Any, batch: Any, loss_function: LossFunction | None) -> Tensor:
        if loss_function is not None:
            loss = loss_function(output, batch)
        elif isinstance(self.module, PipelineModule) and self.module.loss_fn is not None:
            loss = self.module.loss_fn(output, batch[1])
        else:
            loss = loss_of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ConfigError(f"loss={loss!r} must be a tensor with one element; give loss_fn or loss_function")
        if self.context is not None:
            self.context.check_loss(loss)
        return (loss if self._counts_loss else loss - loss.detach()).reshape(())

    # Micro-batches one by one do not exist.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ``ConfigError``: a pipeline runs whole steps."""
        raise ConfigError(
            "engine(batch), backward and step do not exist with pipeline stages, whose micro-batches are interleaved; "
            "call engine.train_batch(iterator) or engine.eval_batch(iterator)"
        )

    backward = step = forward

    # Whole tensors.

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return whole weights and buffers of all stages on the CPU; all ranks call it together."""
        local = super().full_state_dict()
        names = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        local = {name: tensor for name, tensor in local.items() if name in names or self.staged.owns_buffer(name)}
        group = self.groups.group("pp")
        device = self.world.device
        lines = json.dumps([[n, list(t.shape), str(t.dtype).removeprefix("torch.")] for n, t in local.items()])
        gathered: dict[str, Tensor] = {}
        for index, text in enumerate(gather_strings(lines, group, device)):
            for name, shape, dtype in json.loads(text):
                if name in gathered:
                    continue
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                if index == self.groups.index("pp"):
                    tensor.copy_(local[name])
                sent = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
                broadcast_(sent, self.groups.ranks("pp")[index], group)
                gathered[name] = tensor.cpu()
        return gathered

    def owns_buffer(self, name: str) -> bool:
        """Whether this rank saves a buffer."""
        return self.staged.owns_buffer(name) and self.groups.index("dp") == self.groups.index("tp") == 0
