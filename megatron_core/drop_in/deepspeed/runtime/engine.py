"""``DeepSpeedEngine``: DeepSpeed's engine over ``megatron_core.any_model.Engine``."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, HalfPrecisionOptimizer, StepStates, ZeROOptimizer
from deepspeed.runtime.choice import choose_optimizer, choose_scheduler
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.engine_checkpoint import EngineCheckpoint
from deepspeed.runtime.engine_reports import EngineReports
from deepspeed.runtime.engine_settings import EngineSettings
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.rates import ProgramRates
from deepspeed.runtime.zero.partition_parameters import mark_parameters
from deepspeed.utils import groups
from deepspeed.utils.logging import log_dist
from deepspeed.utils.timer import ThroughputTimer
from megatron_core import any_model as native
from megatron_core.any_model.gated_experts import has_moe_layers
from megatron_core.any_model.scheduler import replace_step
from megatron_core.errors import ConfigError
from megatron_core.launcher import read_integer

Route = Literal["train", "eval", "predict"]
ROUTE_TRAIN: Route = "train"
ROUTE_EVAL: Route = "eval"
ROUTE_PREDICT: Route = "predict"


def _counter(name: str, text: str) -> Any:
    """Return a property that reads and sets a counter of the engine."""
    return property(
        lambda self: getattr(self.core.state, name), lambda self, value: setattr(self.core.state, name, value), doc=text
    )


class DeepSpeedEngine(EngineCheckpoint, EngineReports, EngineSettings, nn.Module):
    """Trains ``model`` as DeepSpeed's engine does: ``loss = engine(batch); engine.backward(loss); engine.step()``.

    Attributes of the model that the engine does not have are read from the model. ``core`` is the engine that does the
    work. Construct it with ``deepspeed.initialize``. Errors: ``ConfigError`` and ``LayoutError`` on all ranks.
    """

    def __init__(
        self,
        args: Any = None,
        model: nn.Module | None = None,
        optimizer: Any = None,
        model_parameters: Iterable[Any] | None = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        dist_init_required: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        config: Mapping[str, Any] | None = None,
        config_class: DeepSpeedConfig | None = None,
        mesh_device: Any = None,
        dont_change_device: bool = False,
    ) -> None:
        super().__init__()
        if model is None or config is None:
            raise ConfigError("DeepSpeedEngine needs model and config; use deepspeed.initialize")
        self.args, self.mpu, self.collate_fn = args, mpu, collate_fn
        self._config = DeepSpeedConfig(config, mpu) if config_class is None else config_class
        self.config = self._config._param_dict
        # The engine, with the optimizer of the program or of the JSON.
        chosen = choose_optimizer(model, optimizer, model_parameters, self._config.translation)
        chosen.freeze_others(model)
        settings = {**self._config.translation.settings, **chosen.settings, "check_for_nan_in_loss_and_grad": False}
        self.pipeline_parallelism = isinstance(model, PipelineModule)
        settings["pipeline_model_parallel_size"] = model.num_stages if isinstance(model, PipelineModule) else 1
        if self._config.translation.sums_gradients and settings["pipeline_model_parallel_size"] > 1:
            raise ConfigError("gradient_allreduce_op='sum' with a PipelineModule of several stages: use 'mean'")
        core = native.initialize(
            model, settings, optimizer=chosen.optimizer, model_parameters=chosen.model_parameters, trains=chosen.trains
        ).engine
        core.casts_inputs = self.fp16_auto_cast()
        core.sums_over_ranks = self._config.translation.sums_gradients
        if not self.pipeline_parallelism:
            core.watch_module()
            core.ends_step = lambda: self.is_gradient_accumulation_boundary() and not self._in_no_sync
        self.__dict__["core"] = core  # not a module of this one: its parameters are those of ``module``
        self.module = core.module
        self.basic_optimizer = self.client_optimizer = chosen.share_groups(core.optimizer)
        if chosen.client is not None:
            replace_step(chosen.client, self.step, core.zero_grad)
            if chosen.optimizer is None:  # its class is only seen by the program: the engine has the state
                vars(chosen.client)["state"] = StepStates(core)
        self.client_lr_scheduler = lr_scheduler
        self.param_names = {parameter: name for name, parameter in model.named_parameters()}
        mark_parameters(core)
        # Ranks.
        self.global_rank, self.world_size = core.world.rank, core.world.size
        self.local_rank, self.device = read_integer("LOCAL_RANK", 0), core.world.device
        self.dp_world_size, self.mp_world_size = core.groups.size("dp"), core.groups.size("tp")
        self.sequence_parallel_size = core.groups.size("cp")
        # Counters, and what the program drives.
        self.micro_steps = 0
        """Calls of ``step``."""
        self.tput_timer = ThroughputTimer(batch_size=self.train_batch_size(), synchronizes=False)
        self.has_moe_layers, self.enable_backward_allreduce = has_moe_layers(model)[0], True
        self.sparse_tensor_module_names: set[str] = set()  # sparse gradients are summed as dense ones
        self._boundary: bool | None = None
        self._in_no_sync = self._in_step = self._step_applied = False
        self._rates = ProgramRates(core.optimizer.param_groups, self.train_batch_size)
        core.lr_scheduler = self._rates
        is_half = self.fp16_enabled() or self.bfloat16_enabled()
        at_stage_0 = HalfPrecisionOptimizer if is_half else DeepSpeedOptimizer
        kind = ZeROOptimizer if self.zero_optimization() else at_stage_0
        self.optimizer = kind(core, self.step, chosen.client) if chosen.trains else None
        self.lr_scheduler = choose_scheduler(self.optimizer, lr_scheduler, self._config.translation)
        self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        self._open_reports()
        self._check_curriculum(settings["pipeline_model_parallel_size"])

    core: native.Engine

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the engine, or of the model."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)

    # Counters.

    # Lightning sets it to None, because it calls the scheduler itself.
    lr_scheduler = property(
        lambda self: self._rates.scheduler,
        lambda self, scheduler: setattr(self._rates, "scheduler", scheduler),
        doc="The scheduler that each step calls; None leaves the learning rates to the program.",
    )
    global_steps = _counter("iteration", "Steps so far, with skipped ones.")
    global_samples = _counter("consumed_samples", "Samples of all steps so far.")
    skipped_steps = _counter("skipped_iterations", "Steps without an update, because a gradient was not finite (fp16).")

    # A micro-batch.

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        """Put the model into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> "DeepSpeedEngine":
        """Put the model into evaluation mode."""
        return self.train(False)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model."""
        self.tput_timer.start()
        if self.module.training:
            kwargs = self._with_schedules(kwargs, self.global_steps + 1)
        with self._timed("forward"), self._autocast():
            return self.core.forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute gradients of ``loss``, divided by the accumulation steps unless ``scale_wrt_gas`` is false.

        Returns the divided loss. Gradients are averaged over the ranks.
        """
        self._require_optimizer("backward")
        steps = self.gradient_accumulation_steps()
        given = loss if scale_wrt_gas or not isinstance(loss, Tensor) else loss * steps
        with self._timed("backward"):
            found = self.core.backward(given, retain_graph=retain_graph)
        return found / steps

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the loss scale (fp16), for ``engine.scale(loss).backward()``."""
        self._require_optimizer("scale")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.grad_fn is None:
            raise ConfigError("engine.scale(loss): loss must be a scalar tensor that requires gradients")
        return self.core.scale(loss)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return self._in_step
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next forward, backward and step are the last of their step, instead of counting."""
        if not self.managed_gradient_accumulation():
            raise ConfigError(
                "set_gradient_accumulation_boundary with managed_gradient_accumulation=false: each step() is a "
                "boundary; remove the call or the key"
            )
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context whose backwards belong to a step that ends outside of it; for stages 0 and 1."""
        if self.zero_optimization_partition_gradients():
            raise ConfigError(
                f"no_sync context manager is incompatible with ZeRO stage {self.zero_optimization_stage()}"
                ": gradients are in shards after each backward; use stage 0 or 1, or gradient_accumulation_steps"
            )
        if self._in_no_sync:
            raise ConfigError("no_sync context manager reentry is unsupported: leave out the inner one")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Return a context around all backwards of one step, whose gradients ``step`` sums over the ranks at once."""
        if not self.zero_optimization() or self.pipeline_parallelism:
            raise NotImplementedError(
                "coalesce_grad_reduction needs zero_optimization.stage 1, 2 or 3, and no pipeline parallelism"
            )
        if self._in_no_sync or not self.managed_gradient_accumulation():
            raise ConfigError(
                "coalesce_grad_reduction cannot be nested in a no_sync context, and needs managed_gradient_accumulation"
            )
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a micro-batch; at a boundary clip the gradients, update the weights and call the scheduler.

        ``lr_kwargs``: arguments of the scheduler's ``step``.
        """
        self._require_optimizer("step")
        if self._in_no_sync:
            raise ConfigError(
                "It is illegal to call Engine.step() inside no_sync context manager: end the context first"
            )
        self._use_written_gradients()
        self._in_step = True
        self._rates.arguments = dict(lr_kwargs or {})
        added = self.core._backwards - self.gradient_accumulation_steps()
        share = (self.core.micro_step + 1) / self.gradient_accumulation_steps()  # programs may leave out calls
        try:
            with self._timed("step"):
                report = self.core.step()
        finally:
            self._in_step, self._rates.arguments = False, {}
        self.micro_steps += 1
        if not self.managed_gradient_accumulation():
            self.global_samples += added * self.train_batch_size() // self.gradient_accumulation_steps()
        self._step_applied = report is not None and not report.skipped
        self.tput_timer.stop(global_step=report is not None, report_speed=False)
        if report is not None:
            if self.progressive_layer_drop is not None:
                self.progressive_layer_drop.update_state(self.global_steps - 1)
            self._report_step(report, share)
        every = self.steps_per_print()
        if report is not None and every and self.global_steps % every == 0:
            rates = f"lr={self.get_lr()}, mom={self.get_mom()}"
            log_dist(f"step={self.global_steps}, skipped={self.skipped_steps}, {rates}", ranks=[0])

    def _use_written_gradients(self) -> None:
        """At stage 0, replace gradients by what the program wrote into ``parameter.grad``, also without a backward."""
        trained = () if self.zero_optimization() else self.core._trained
        written = [(p, p.grad.to(vars(p)["main_grad"].dtype)) for p in trained if p.grad is not None]
        if written and not self.core._backwards:
            self.core._begin_backward(weighted=False)
            self.core._end_backward(torch.tensor(math.nan), 1.0)
            self.core._knows_loss = False
        for parameter, gradient in written:
            self.core.whole.set_gradient(parameter, gradient / self.core.loss_scale)
            parameter.grad = None

    def was_step_applied(self) -> bool:
        """Whether the last ``step()`` changed the weights."""
        return self._step_applied

    def zero_grad(self) -> None:  # type: ignore[override]
        """Discard the gradients of the current step; of an accumulation that has begun at stages 0 and 1 alone."""
        if not self.core.micro_step:
            self.core.zero_grad()
        elif not self.zero_optimization_partition_gradients():
            self.core.discard_gradients()

    def _backward_epilogue(self) -> None:
        """Do nothing: programs for DeepSpeed before 0.18.3 call it after ``loss.backward()``."""

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Do nothing: ``step`` sums gradients that are not summed yet."""

    def _require_optimizer(self, name: str) -> None:
        if self.optimizer is None:
            raise ConfigError(f"engine.{name}() without an optimizer; give one to deepspeed.initialize or in the JSON")

    # Batch sizes and data.

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step; ``ValueError`` unless they are whole."""
        together = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % together:
            raise ValueError(f"Train batch size must be divisible by micro-batch data parallelism ({together})")
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // together
        self._set_batch_size()

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch; the accumulation steps stay."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        steps = self.gradient_accumulation_steps()
        self._config.train_batch_size = micro_batch_size * steps * self.dp_world_size
        self._set_batch_size()

    def _set_batch_size(self) -> None:
        self.core.set_batch_size(self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps())

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: Route = ROUTE_TRAIN,
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Return a loader of this rank's micro-batches: shuffled for training, else in order."""
        is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not is_map and not isinstance(dataset, torch.utils.data.IterableDataset):
            raise ValueError(f"Training data must be a torch Dataset, not {type(dataset).__name__}")
        ranks, rank = self.dp_world_size, self.core.groups.index("dp")
        if route == ROUTE_TRAIN and self.curriculum_learning_enabled():
            data_sampler = self._curriculum(len(dataset), rank, ranks)
        elif data_sampler is None and route in (ROUTE_PREDICT, ROUTE_EVAL):
            data_sampler = torch.utils.data.DistributedSampler(dataset, ranks, rank, shuffle=False)
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory and self.device.type == "cuda",
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=ranks,
            data_parallel_rank=rank,
            dataloader_drop_last=self.dataloader_drop_last(),
        )

    # Groups, memory and compilation.

    def get_data_parallel_rank(self) -> int:
        """Rank among the ranks with the same part of the model."""
        return groups._get_data_parallel_rank()

    def get_model_parallel_rank(self) -> int:
        """Rank among the ranks that split the model."""
        return groups.get_model_parallel_rank()

    @property
    def data_parallel_group(self) -> Any:
        """Ranks with the same part of the model."""
        return groups._get_data_parallel_group()

    def empty_partition_cache(self) -> None:
        """Return unused memory to the GPU; gathered weights are freed after each forward and backward in any case."""
        get_accelerator().empty_cache()

    def compile(
        self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **others: Any
    ) -> None:
        """Compile the model in place, by torch; at stage 3 gathers divide the graph at each module with parameters."""
        if unknown := sorted(name for name, value in others.items() if value):
            raise ConfigError(f"engine.compile: {', '.join(unknown)} of DeepCompile is not supported; remove it")
        self.core.data_parallel.keep_hooks_out_of_graphs()
        self.module.compile(**{**(compile_kwargs or {}), "backend": backend})
        self._is_compiled = True

    @property
    def is_compiled(self) -> bool:
        """Whether ``compile`` was called."""
        return self.__dict__.get("_is_compiled", False)

    def destroy(self) -> None:
        """Complete the checkpoints that are being written, and close the files of metrics."""
        self.core.finish_saving()
        self.core.monitor.close()

    def train_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refer to the engine of pipelines, which has this method."""
        raise ConfigError(
            "train_batch needs a PipelineModule; call engine(batch), engine.backward(loss) and engine.step()"
        )

    eval_batch = train_batch


DeepSpeedOptimizerCallable = Callable[[list[Any]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable = Callable[[torch.optim.Optimizer], Any]
