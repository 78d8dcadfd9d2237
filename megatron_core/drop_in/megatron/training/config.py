"""A run's settings in sections, with Megatron-LM's names and defaults where this package has
them, too."""

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron_core.config import RunConfig
from megatron_core.config.file import convert, field_types


@dataclass(kw_only=True)
class TrainingConfig:
    """Batches and the length of the training."""

    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: list[int] | None = field(default=None, metadata={"argparse_meta": {"nargs": 3}})
    step_batch_size_schedule: str | None = None
    train_iters: int | None = None
    train_samples: int | None = None
    exit_interval: int | None = None
    exit_duration_in_mins: int | None = None
    iterations_to_skip: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class ValidationConfig:
    """Evaluations."""

    eval_iters: int = 100
    eval_interval: int | None = None
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None
    skip_train: bool = False


@dataclass(kw_only=True)
class SchedulerConfig:
    """Learning rate and weight decay over time."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_init: float = 0.0
    override_opt_param_scheduler: bool = False
    use_checkpoint_opt_param_scheduler: bool = False
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and loading; ``save_rng``, ``load_rng`` and how ranks share the work change nothing here."""

    save: str | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    save_optim: bool = True
    save_rng: bool = True
    load: str | None = None
    load_optim: bool = True
    load_rng: bool = True
    finetune: bool = False
    ckpt_step: int | None = None
    use_checkpoint_args: bool = False
    exit_on_missing_checkpoint: bool = False
    async_save: bool = False
    non_persistent_save_interval: int | None = None
    non_persistent_global_ckpt_dir: str | None = None
    non_persistent_ckpt_type: Literal["global", "local"] | None = None
    non_persistent_local_ckpt_dir: str | None = None
    replication: bool = False
    replication_jump: int | None = None
    replication_factor: int = 2
    fully_parallel_save: bool = True
    fully_parallel_load: bool = False


@dataclass(kw_only=True)
class TokenizerConfig:
    """The tokenizer."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_size: int | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    chat_template: str | None = None


@dataclass(kw_only=True)
class LoggerConfig:
    """What is logged, and where."""

    log_interval: int = 100
    log_params_norm: bool = False
    log_num_zeros_in_grad: bool = False
    log_throughput: bool = False
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None


@dataclass(kw_only=True)
class ProfilingConfig:
    """Which steps are profiled; ``use_nsys_profiler`` is ``--profile`` here, ``use_pytorch_profiler`` implies it."""

    use_nsys_profiler: bool = field(default=False, metadata={"argparse_meta": {"arg_names": ["--profile"]}})
    use_pytorch_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class RNGConfig:
    """The seed of initial weights, data order and dropout."""

    seed: int = 1234


@dataclass(kw_only=True)
class DistributedInitConfig:
    """How ranks find one another."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    distributed_timeout_minutes: int = 10


@dataclass(kw_only=True)
class RerunStateMachineConfig:
    """Checks of results; there is no rerun here, and ``--inject-fault`` injects faults."""

    error_injection_rate: int = 0
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = "transient_error"
    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "validate_results"
    check_for_nan_in_loss: bool = True


@dataclass(kw_only=True)
class StragglerDetectionConfig:
    """Whether slow ranks are found."""

    log_straggler: bool = False


@dataclass(kw_only=True)
class PretrainConfigContainer:
    """All settings of a run; ``model`` has those of its model, such as a ``GPTModelConfig``, if a program sets it."""

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
        """This package's settings: those of ``defaults``, such as the model's, and of all sections but ``model``."""
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
