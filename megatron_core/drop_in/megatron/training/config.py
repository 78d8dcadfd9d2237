"""The settings of a run in sections, with Megatron-LM's names and defaults."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.mirror import mirror
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron_core.config import RunConfig
from megatron_core.config.file import convert, field_types


@dataclass(kw_only=True)
class TrainingConfig(mirror("TrainingConfig", kw_only=True)):  # type: ignore[misc]
    """Batches and the length of training."""

    step_batch_size_schedule: str | None = None


class ValidationConfig(mirror("ValidationConfig", kw_only=True)):  # type: ignore[misc]
    """Evaluation."""


class SchedulerConfig(mirror("SchedulerConfig", kw_only=True)):  # type: ignore[misc]
    """Schedules of learning rate and weight decay."""


class CheckpointConfig(mirror("CheckpointConfig", kw_only=True)):  # type: ignore[misc]
    """Saving and loading; ``save_rng``, ``load_rng`` and ``fully_parallel_...`` have no effect."""


class TokenizerConfig(mirror("TokenizerConfig", kw_only=True)):  # type: ignore[misc]
    """The tokenizer."""


class LoggerConfig(mirror("LoggerConfig", kw_only=True)):  # type: ignore[misc]
    """Logs and their destinations."""


@dataclass(kw_only=True)
class ProfilingConfig(mirror("ProfilingConfig", kw_only=True)):  # type: ignore[misc]
    """The profiled steps; either of the two switches enables --profile."""

    use_nsys_profiler: bool = field(default=False, metadata={"argparse_meta": {"arg_names": ["--profile"]}})


class RNGConfig(mirror("RNGConfig", kw_only=True)):  # type: ignore[misc]
    """The seed of initial weights, data order and dropout."""


class DistributedInitConfig(mirror("DistributedInitConfig", kw_only=True)):  # type: ignore[misc]
    """The start of torch.distributed."""


@dataclass(kw_only=True)
class RerunStateMachineConfig(mirror("RerunStateMachineConfig", kw_only=True)):  # type: ignore[misc]
    """Checks of results. Steps are never run again; --inject-fault injects faults."""

    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"


class StragglerDetectionConfig(mirror("StragglerDetectionConfig", kw_only=True)):  # type: ignore[misc]
    """Detection of slow ranks."""


@dataclass(kw_only=True)
class PretrainConfigContainer:
    """All settings of a run; ``model`` is a configuration such as ``GPTModelConfig``, if the program sets it."""

    train: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ddp: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    dist: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    rerun_state_machine: RerunStateMachineConfig = field(default_factory=RerunStateMachineConfig)
    straggler: StragglerDetectionConfig = field(default_factory=StragglerDetectionConfig)
    model: Any = None

    def run_config(self, defaults: RunConfig | None = None) -> RunConfig:
        """Return the engine's settings: ``defaults``, updated with all sections except ``model``."""
        known, values = field_types(), asdict(self.optimizer.translated())
        names = [each.name for each in fields(self) if each.name not in ("optimizer", "model")]
        for section in (getattr(self, name) for name in names):
            values |= {each.name: getattr(section, each.name) for each in fields(section)}
        values |= {f"no_{name}_optim": not values[f"{name}_optim"] for name in ("save", "load")}
        values["check_for_nan_in_loss_and_grad"] = values["check_for_nan_in_loss"]
        values["profile"] = values["use_nsys_profiler"] or values["use_pytorch_profiler"]
        steps: str | None = values["step_batch_size_schedule"]
        values["step_batch_size_schedule"] = None if steps is None else steps.split()
        given = {
            name: convert(list(value) if isinstance(value, tuple) else value, known[name])
            for name, value in values.items()
            if value is not None and name in known
        }
        return RunConfig.from_flat((defaults or RunConfig()).flat() | given)
