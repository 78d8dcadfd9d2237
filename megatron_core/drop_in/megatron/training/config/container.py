"""Configurations of several sections, and their dictionaries and YAML files."""

import copy
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar

import yaml

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.mirror import refuse_changes
from megatron.core.msc_utils import maybe_msc
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.training.config.allowlist import Serializable
from megatron.training.config.common_config import DistributedInitConfig, ProfilingConfig, RNGConfig
from megatron.training.config.inference_config import InferenceSetupConfig  # type: ignore[import-not-found]
from megatron.training.config.instantiate_utils import HAVE_OMEGACONF, InstantiationMode, instantiate
from megatron.training.config.resilience_config import RerunStateMachineConfig, StragglerDetectionConfig
from megatron.training.config.training_config import (
    CheckpointConfig,
    LoggerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.training.config.utils import sanitize_dataclass_config
from megatron.training.config.yaml_utils import safe_yaml_representers
from megatron_core.config import RunConfig
from megatron_core.config.run import field_types
from megatron_core.config.values import convert
from megatron_core.errors import ConfigError
from megatron_core.text_file import parse_yaml

Container = TypeVar("Container", bound="ConfigContainerBase")


@dataclass(kw_only=True)
class ConfigContainerBase:
    """A dataclass of sections that can be written to a dictionary or a YAML file and read again.

    Each section's ``_target_`` is the path of its class; the allow-list of ``instantiate`` checks it.
    """

    @classmethod
    def from_dict(
        cls: type[Container], config_dict: dict[str, Any], mode: InstantiationMode = InstantiationMode.STRICT
    ) -> Container:
        """Return the container of a dictionary.

        STRICT raises ValueError for entries that are not fields, LENIENT leaves them out. Raises AssertionError without
        ``_target_``.
        """
        assert "_target_" in config_dict, "the dictionary has no _target_; give it the path of a class"
        entries = sanitize_dataclass_config(copy.deepcopy(config_dict))
        known = {each.name for each in fields(cls) if not each.name.startswith("_")} | {"_target_"}
        extra = sorted(set(entries) - known)
        if extra and mode is InstantiationMode.STRICT:
            raise ValueError(f"Dictionary contains extra keys not in {cls.__qualname__}: {extra}; remove them")
        return instantiate({name: entries[name] for name in entries if name in known}, mode=mode)

    @classmethod
    def from_yaml(
        cls: type[Container], yaml_path: str, mode: InstantiationMode = InstantiationMode.LENIENT
    ) -> Container:
        """Return the container of a YAML file; OmegaConf, if it is installed, resolves references in it."""
        if not maybe_msc.os.path.exists(yaml_path):
            raise FileNotFoundError(f"YAML file not found: {yaml_path}")
        with maybe_msc.open(yaml_path, "r") as file:
            text = file.read()
        try:
            entries = parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"{yaml_path} is not valid YAML: {error}; correct the file") from None
        if not isinstance(entries, dict):
            raise ConfigError(f"{yaml_path} holds a {type(entries).__name__}; it must be a mapping of sections")
        if HAVE_OMEGACONF:
            from omegaconf import OmegaConf  # type: ignore[import-not-found]

            entries = OmegaConf.to_container(OmegaConf.create(entries), resolve=True)
        return cls.from_dict(entries, mode=mode)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields but private ones, with ``_target_``; other dataclasses become dictionaries, too."""
        return _entries(self, type(self))

    @classmethod
    def _convert_value_to_dict(cls, value: Any) -> Any:
        if isinstance(value, ConfigContainerBase):
            return value.to_dict()
        if isinstance(value, Serializable):
            return value.as_dict()
        if hasattr(value, "to_cfg_dict"):
            return value.to_cfg_dict()
        if is_dataclass(value) and not isinstance(value, type):
            return _entries(value, cls)
        if isinstance(value, list | tuple):
            return [cls._convert_value_to_dict(each) for each in value]
        if isinstance(value, dict):
            return {key: cls._convert_value_to_dict(each) for key, each in value.items()}
        return value

    def to_yaml(self, yaml_path: str) -> None:
        """Write the container to a YAML file."""
        with safe_yaml_representers(), maybe_msc.open(yaml_path, "w") as file:
            yaml.safe_dump(self.to_dict(), file, default_flow_style=False)

    def print_yaml(self) -> None:
        """Print the container as YAML."""
        with safe_yaml_representers():
            print(yaml.safe_dump(self.to_dict(), default_flow_style=False))

    def __deepcopy__(self: Container, memo: dict[int, Any]) -> Container:
        """Return a copy without calling ``__post_init__`` again."""
        memo[id(self)] = twin = object.__new__(type(self))
        for each in fields(self):
            setattr(twin, each.name, copy.deepcopy(getattr(self, each.name), memo))
        return twin


def _entries(value: Any, container: type[ConfigContainerBase]) -> dict[str, Any]:
    kind = type(value)
    names = [each.name for each in fields(value) if not each.name.startswith("_")]
    values = {name: container._convert_value_to_dict(getattr(value, name)) for name in names}
    return {"_target_": f"{kind.__module__}.{kind.__qualname__}"} | values


@dataclass(kw_only=True)
class PretrainConfigContainer(ConfigContainerBase):
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
            refuse_changes(section)
            values |= {each.metadata.get("setting", each.name): getattr(section, each.name) for each in fields(section)}
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


@dataclass(kw_only=True)
class InferenceConfigContainer(ConfigContainerBase):
    """The settings of a program for inference."""

    model: Any
    checkpoint: CheckpointConfig
    inference: InferenceSetupConfig
    dist: DistributedInitConfig = field(default_factory=DistributedInitConfig)
    rng: RNGConfig = field(default_factory=RNGConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
