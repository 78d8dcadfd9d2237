"""The engine: forward, backward and step of any ``nn.Module`` over this project's data parallelism.

engine, optimizer, loader, scheduler = megatron_core.initialize(model=model, config={"zero_stage": 2, "bf16": True})
for batch in loader:
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.any_model.agreement import AgreeingDataParallel
from megatron_core.any_model.arguments import next_batch
from megatron_core.any_model.backward import EngineBackward
from megatron_core.any_model.checkpoints import EngineCheckpoints, EngineState, check_client_state
from megatron_core.any_model.context_trial import run_split
from megatron_core.any_model.data import EngineLoader, cast_floating, evaluating, loss_of, model_arguments
from megatron_core.any_model.direct import DirectBackward, attach_to
from megatron_core.any_model.gated_experts import with_all_experts
from megatron_core.any_model.module import Initialise, UnitClasses
from megatron_core.any_model.monitoring import StepMonitor, StepReport
from megatron_core.any_model.offload import EngineOffload
from megatron_core.any_model.optimizer import EngineOptimizer, check_trained, needs_whole_parameters, optimizer_on
from megatron_core.any_model.prepare import Choices, Prepared, prepare_model
from megatron_core.any_model.scheduler import make_scheduler, plain_state, replace_step, restore_state, share_groups
from megatron_core.any_model.tensor import whole_tensor
from megatron_core.any_model.torch_optimizer import TorchOptimizer
from megatron_core.any_model.whole import WholeTensors
from megatron_core.config import RunConfig
from megatron_core.errors import CheckpointError, ConfigError, MegatronError
from megatron_core.features.fp8.amax_history import update_of
from megatron_core.features.matrix_optimizers.whole_shards import whole_parameters
from megatron_core.features.offload.state import PARTS
from megatron_core.optimizer.lr_schedule import LearningRateSchedule
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.compiled import is_compiled
from megatron_core.parallel.meter import METER
from megatron_core.parallel.world import World
from megatron_core.schedules.actions import Action
from megatron_core.training.driver import finish_gradients, read_norm_and, update_weights
from megatron_core.training.setup import data_parallel_of

LossFunction = Callable[..., Tensor]


class Engine(EngineBackward, EngineOffload, nn.Module):
    """Trains ``module`` with data parallelism, gradient accumulation and mixed precision.

    The loss of a step is the mean of the losses given to ``backward`` over all micro-batches of all ranks, or, if the
    number of terms is given with each, (sum of all losses) / (number of terms). Gradients are in
    ``parameter.main_grad`` (float32 for 16-bit weights), not in ``parameter.grad``.
    """

    def __init__(
        self,
        module: nn.Module,
        config: RunConfig,
        world: World,
        *,
        model_parameters: Iterable[Any] | None = None,
        own_optimizer: torch.optim.Optimizer | None = None,
        unit_classes: UnitClasses | None = None,
        initialise: Initialise | None = None,
        trains: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.world = world
        parameters = None if model_parameters is None else list(model_parameters)
        prepared = self._prepare(Choices(parameters, unit_classes, initialise, own_optimizer is not None, trains))
        self.groups = prepared.groups
        self.context = prepared.context
        self.fp8 = prepared.fp8
        self._after_gradients = update_of(self.fp8)
        # Buckets and the optimizer on their shards.
        cuts_no_parameter = needs_whole_parameters(own_optimizer, config.parallel, self.groups.size("dp"))
        self.data_parallel = data_parallel_of(
            AgreeingDataParallel,
            config,
            prepared.stages,
            self.groups,
            world.device,
            prepared.initialisation,
            units=prepared.units,
            rule_of=whole_parameters if cuts_no_parameter else None,
        )
        self.optimizer = EngineOptimizer(prepared.param_groups, self.step, self.zero_grad)
        self._sharded = optimizer_on(
            self.data_parallel, config, self.groups, self.optimizer.param_groups, own_optimizer
        )
        self.whole = WholeTensors(self.data_parallel, self._sharded)
        """Reads and writes whole weights, gradients and optimizer state of parameters at every ZeRO stage."""
        # Counters, and the schedule of the learning rate.
        self.state = EngineState(layout=self.layout)
        self.monitor = StepMonitor(config, self.groups, world, self.layout)
        self.ends_step: Callable[[], bool] = lambda: self.micro_step + 1 == self.gradient_accumulation_steps
        self.casts_inputs = self.splits_in_evaluation = True
        self.last_report: StepReport | None = None
        self.lr_scheduler: Any = None
        total = config.training.train_iters or config.training.train_samples or 1
        self._schedule = LearningRateSchedule(config.optimizer, total, by_samples=config.schedules_by_samples)
        self._base_rates = self._rates = self._read_rates()
        self._losses = torch.zeros(2, dtype=torch.float64, device=world.device)
        self._trained = dict.fromkeys(parameter for parameter in module.parameters() if parameter.requires_grad)
        data = self.data_parallel
        self._direct = DirectBackward([*self._trained], self._begin_direct, self._end_direct, data.hooks)
        self.before_update: Callable[[], None] = lambda: None
        """Called after gradients are summed over all ranks and before they are clipped."""
        attach_to(module, self.zero_grad, data.give_back)
        self._checkpoints = EngineCheckpoints(module, config, data, self._sharded, self.fp8, self.owns_buffer)

    def _prepare(self, choices: Choices) -> Prepared:
        return prepare_model(self.module, self.config, self.world, choices)

    def owns_buffer(self, name: str) -> bool:
        """Whether this rank saves a buffer in checkpoints."""
        return self.groups.rank == 0

    @property
    def layout(self) -> str:
        """Short description of the layout, such as ``tp2 pp2 dp2 zero3``."""
        stage = self.config.parallel.dp_zero_stage
        groups = self.groups
        axes = [axis for axis in ("tp", "cp", "pp", "ep") if groups.size(axis) > 1]
        sizes = "".join(f"{axis}{groups.size(axis)} " for axis in axes)
        return f"{sizes}dp{groups.size('dp')}" + (f" zero{stage}" if stage else "")

    def make_loader(
        self, dataset: Any, *, collate_fn: Callable[[list[Any]], Any] | None = None, shuffle: bool = True
    ) -> EngineLoader:
        """Return a loader of this rank's micro-batches of a map-style data set."""
        return EngineLoader(
            dataset=dataset,
            micro_batch_size=self.config.training.micro_batch_size,
            global_batch_size=self.global_batch_size,
            rank=self.groups.index("dp"),
            ranks=self.groups.size("dp"),
            seed=self.config.training.seed,
            consumed=lambda: self.state.consumed_samples,
            shuffle=shuffle,
            num_workers=self.config.data.num_workers,
            collate_fn=collate_fn,
            pin_memory=self.world.device.type == "cuda",
        )

    def set_scheduler(self, scheduler: Any, replaced: torch.optim.Optimizer | None = None) -> None:
        """Use the caller's learning-rate scheduler instead of the configured schedule.

        Schedulers of the optimizer ``replaced`` change the settings of the engine's groups, and its ``step()`` is that
        of the engine.
        """
        if replaced is not None:
            share_groups(replaced, self.optimizer)
            refuses = not isinstance(self._sharded, TorchOptimizer)
            replace_step(replaced, self.optimizer.step, self.zero_grad, refuses_hooks=refuses)
        self.lr_scheduler = make_scheduler(scheduler, self.optimizer)

    # A micro-batch.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; with ``casts_inputs``, its floating-point arguments are cast to the compute dtype."""
        if self.data_parallel.is_given_back:
            raise ConfigError("another engine was constructed for this model later; call that one")
        self._require_state(("weights",))
        action = Action(0, "F", self.micro_step)
        self.monitor.begin(self.state.iteration)
        # a backward may have failed
        self._direct.is_running = False
        self.data_parallel.grad_factor = 1.0
        before = METER.switch("forward")
        self.data_parallel.begin_action(action)
        if is_compiled(self.module):  # the graphs of torch.compile read all weights
            self.data_parallel.finish_param_sync()
        args, kwargs = self._in_compute_dtype((args, kwargs))
        context = self.context if self.module.training or self.splits_in_evaluation else None
        output = self.module(*args, **kwargs) if context is None else run_split(context, args, kwargs)
        self.data_parallel.end_action(action)
        if torch.is_grad_enabled():
            self._direct.watch(output)
        METER.switch(before)
        return output

    def _in_compute_dtype(self, value: Any) -> Any:
        dtype = getattr(torch, self.config.training.compute_dtype)
        return cast_floating(value, dtype) if self.casts_inputs and dtype != torch.float32 else value

    def step(self) -> StepReport | None:
        """End a micro-batch; the last one of a step updates the weights and returns a report, others return None."""
        if self.whole.is_open:
            raise ConfigError("step() inside of engine.gathered(...): end the context first")
        self._require_state(PARTS)
        if not self._backwards:
            raise ConfigError("step() without backward(): call engine.backward(loss) for each micro-batch first")
        self._refuse_sums()
        self._backwards = 0
        if not self.ends_step():
            self.micro_step += 1
            return None
        self.micro_step = 0
        return self._update()

    @torch.no_grad()
    def _update(self) -> StepReport:
        """Sum the gradients over all ranks, clip, and update the weights."""
        check_trained(self.module, self._trained)
        self.whole.check_unchanged()
        data = self.data_parallel
        sharded = self._sharded
        METER.switch("gradients")
        finish_gradients(data, self._after_gradients)
        self.before_update()
        METER.switch("optimizer")
        totals = self._losses
        all_reduce_(totals, self.groups.group("dp"))
        if self._weighted:
            divisor = torch.where(totals[1] > 0, totals[1], 1.0)
            for bucket in data.buckets:
                bucket.grad_shard.div_(divisor.to(bucket.grad_shard.dtype))
        norm, total, terms = read_norm_and(totals, sharded)
        loss = total / (terms or 1.0)
        self._refuse_bad(loss, norm)
        # Update with the learning rates of this step.
        rate = self._set_rates()
        skipped = update_weights(sharded, [data], norm, rate)
        if not skipped:
            # As after a step of torch, backward of an earlier forward is an error: its weights are gone.
            torch.autograd.graph.increment_version([*self._trained])
            self.whole.accept_weights()
        self.discard_gradients()
        METER.switch("other")
        return self._advance(loss, norm, rate, skipped=skipped)

    def _advance(self, loss: float, norm: float, rate: float, *, skipped: bool) -> StepReport:
        """Advance the counters after a step, and return its report."""
        self.state.iteration += 1
        self.state.consumed_samples += self.global_batch_size
        self.state.skipped_iterations += skipped
        self.state.skipped_samples += skipped * self.global_batch_size
        if self.lr_scheduler is not None and not skipped:
            self.lr_scheduler.step()
        if self.world.watchdog is not None:
            self.world.watchdog.beat(self.state.iteration + 1)
        self.last_report = StepReport(self.state.iteration, loss, norm, rate, skipped)
        scale = self._sharded.loss_scale.scale
        self.monitor.after_step(self.state, loss, norm, rate, scale, self.global_batch_size, skipped=skipped)
        return self.last_report

    def _refuse_bad(self, loss: float, norm: float) -> None:
        training = self.config.training
        known = norm + loss if self._knows_loss else norm
        if training.check_for_nan_in_loss_and_grad and not training.fp16 and not math.isfinite(known):
            self.discard_gradients()  # the program may continue with other data
            raise MegatronError(
                f"iteration {self.state.iteration + 1}: loss={loss} and gradient norm={norm} must be finite; lower the "
                "learning rate, inspect the data, or set check_for_nan_in_loss_and_grad=False to continue"
            )

    def _set_rates(self) -> float:
        """Set the learning rate of each group according to the configured schedule; return that of the first group.

        Rates stay as they are with a scheduler, and once the program has changed one.
        """
        groups = self.optimizer.param_groups
        self._notice_rates()
        if self.lr_scheduler is None and not self.state.rates_are_the_programs:
            after = self.state.consumed_samples + self.global_batch_size
            position = after if self._schedule.by_samples else self.state.iteration + 1
            share = self._schedule.lr(position) / self.config.optimizer.lr
            for group, base in zip(groups, self._base_rates, strict=True):
                group["lr"] = None if base is None else base * share
            self._rates = self._read_rates()
        return float(groups[0]["lr"] or 0.0)

    def _notice_rates(self) -> None:
        """Note whether the program has changed a learning rate since the schedule set them."""
        if self.lr_scheduler is None and self._read_rates() != self._rates:
            self.state.rates_are_the_programs = True

    def _read_rates(self) -> list[float | None]:
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        return [None if rate is None else float(rate) for rate in rates]

    # Whole steps.

    def train_batch(self, batches: Iterator[Any], loss_function: LossFunction | None = None) -> StepReport:
        """Take one optimizer step with the next micro-batches of ``batches``.

        ``loss_function(output, batch)`` returns the loss; by default it is the module's output, its attribute or entry
        ``loss``, or its first entry.
        """
        report = None
        while report is None:
            batch = next_batch(batches)
            self.backward(self._loss(batch, loss_function))
            report = self.step()
        return report

    @torch.no_grad()
    def eval_batch(self, batches: Iterator[Any], loss_function: LossFunction | None = None) -> float:
        """Return the mean loss of the next ``gradient_accumulation_steps`` micro-batches of all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        with evaluating(self.module):
            for _ in range(self.gradient_accumulation_steps):
                total += self._loss(next_batch(batches), loss_function).double()
        all_reduce_(total, self.groups.group("dp"))
        return float(total) / (self.gradient_accumulation_steps * self.groups.size("dp"))

    def _loss(self, batch: Any, loss_function: LossFunction | None) -> Tensor:
        args, kwargs = model_arguments(self, batch)
        output = self(*args, **kwargs)
        return loss_of(output) if loss_function is None else loss_function(output, batch)

    # Weights and checkpoints.

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return whole weights and buffers on the CPU, as ``module.state_dict()`` does; all ranks call it together."""
        names = {parameter: name for name, parameter in self.module.named_parameters(remove_duplicate=False)}
        self._sharded.synchronize()
        self._require_state(("weights",))
        tensors = {p: whole_tensor(p, self.groups) for p in self.data_parallel.reading(names)}
        state = self.module.state_dict(keep_vars=True)
        state = {n: tensors[t] if t in tensors else t.detach().to("cpu", copy=True) for n, t in state.items()}
        return with_all_experts(state, self.module)

    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        client_state: Mapping[str, Any] | None = None,
        *,
        trained_only: bool = False,
    ) -> None:
        """Write weights, buffers, optimizer state and counters into ``folder``; all ranks call it together.

        ``client_state``: JSON values that ``load_checkpoint`` returns. ``trained_only``: without the frozen weights, as
        of the base of adapters; ``load_checkpoint`` with ``strict=False`` leaves those of the model as they are.
        """
        if self.micro_step or self._backwards:
            raise CheckpointError(
                f"save_checkpoint after {self.micro_step or self._backwards} of {self.gradient_accumulation_steps} "
                "micro-batches: gradients are not saved; call it after the step"
            )
        self._require_state(PARTS)
        check_client_state(client_state or {})
        self._notice_rates()
        self.state.client_state, self.state.scheduler = dict(client_state or {}), plain_state(self.lr_scheduler)
        self._checkpoints.save(folder, self.state, trained_only=trained_only)

    def finish_saving(self) -> None:
        """Wait for the checkpoint that ``async_save`` writes in the background."""
        self._checkpoints.finish()

    def load_checkpoint(
        self,
        folder: str | os.PathLike[str],
        iteration: int | None = None,
        *,
        load_optimizer: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Load the newest checkpoint of ``folder``, or that of ``iteration``; return its ``client_state``.

        The number of ranks and the ZeRO stage may differ from the run that saved it. All ranks call it together.
        ``folder`` may also be one of DeepSpeed, see ``hub.deepspeed``; ``iteration`` is then its global step.
        Gradients of an incomplete step are discarded. With ``strict=False`` tensors that the checkpoint does not have
        keep their values, and tensors that the model does not have are not read. ``CheckpointError``: none, damaged, or
        of another model.
        """
        self._require_state(PARTS)
        self.state = self._checkpoints.load(folder, iteration, load_optimizer=load_optimizer, strict=strict)
        self.whole.accept_weights()
        self.discard_gradients()
        self.micro_step = self._backwards = 0
        if load_optimizer:
            if self.lr_scheduler is None and not self.state.rates_are_the_programs:
                # The schedule continues: a rate left over from the program would hide that it sets the same one again.
                for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                    group["lr"] = base
            self._rates = self._read_rates()  # changes of the program before loading do not count
        if self.lr_scheduler is not None and self.state.scheduler:
            restore_state(self.lr_scheduler, self.state.scheduler)
        return dict(self.state.client_state)
