"""The whole configuration of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar, get_type_hints

from megatron_core.config.attention import AttentionKind, attention_of
from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.data import DataConfig
from megatron_core.config.model import ModelConfig
from megatron_core.config.monitor import MonitorConfig
from megatron_core.config.parallel import ParallelConfig, compression_of
from megatron_core.config.setting import Setting, declarations
from megatron_core.config.training import BadStepConfig, OptimizerConfig, TrainingConfig
from megatron_core.config.tree import default_parts
from megatron_core.config.values import perhaps
from megatron_core.feature import (
    Extensible,
    Section,
    cached_for_features,
    extended,
    extends,
    features,
    setting_names,
)

Configuration = TypeVar("Configuration", bound="RunConfig")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of ``pretrain_gpt.py``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The shape of the transformer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model and its batch are split over ranks."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    """Batches, length of training, precision."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer and learning rate."""
    data: DataConfig = field(default_factory=DataConfig)
    """Training data and the tokenizer."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    """Logging and checks during training."""
    resilience: BadStepConfig = field(default_factory=BadStepConfig)
    """Bad steps; the name is that of the section in configuration files."""

    features: tuple[Any, ...] = field(
        default_factory=lambda: tuple(section() for section in feature_sections().values())  # type: ignore[has-type]
    )
    """The sections of optional features; ``section`` returns one of them."""

    @property
    def max_positions(self) -> int:
        """Number of learned positions after defaults."""
        return self.model.max_position_embeddings or self.data.seq_length

    @property
    def longest_text(self) -> int:
        """Positions to which rotary frequencies are scaled: those of a training sequence, or ``max_positions``."""
        return self.data.seq_length if self.model.longest_text_scales_rotary else self.max_positions

    @property
    def residual_dtype(self) -> str:
        """Name of the torch dtype of the residual stream between layers, and of messages between pipeline stages."""
        dtype = self.training.compute_dtype
        return "float32" if self.model.fp32_residual_connection and dtype != "float64" else dtype

    @property
    def schedules_by_samples(self) -> bool:
        """Whether the learning rate follows the sequences used, as in Megatron-LM with --train-samples, and not the
        steps."""
        by_samples = self.training.train_samples is not None and not self.optimizer.counts_iterations
        return by_samples or self.optimizer.counts_samples

    @property
    def invariant_parts(self) -> int:
        """Canonical parts of features with --layout-invariant, after defaults."""
        return self.parallel.layout_invariant_parts or default_parts(self.model.num_attention_heads)

    @property
    def num_groups(self) -> int:
        """Number of outer groups: parts of the ranks, each of which takes steps of its own."""
        return self.optional("num_groups") or 1

    def section(self, section_type: type[Section]) -> Section:
        """The settings of a feature, by the class of its section, or the section of the core that they extend."""
        if issubclass(section_type, Extensible):
            extensible: Extensible = getattr(self, _extended_by(section_type))
            return extensible.section(section_type)
        section: Section | None = self._features_by_type.get(section_type)
        return section_type() if section is None else section

    @cached_property
    def _features_by_type(self) -> dict[type[Any], Any]:
        # A run asks for sections thousands of times, and a search for a layout millions of times.
        return {type(section): section for section in self.features}

    def with_section(self: Configuration, section: Any) -> Configuration:
        """Replace the settings of a feature, or the section of the core that they extend."""
        if isinstance(section, Extensible):
            extended_section: dict[str, Any] = {_extended_by(type(section)): section}
            return replace(self, **extended_section)
        return replace(self, features=tuple(section if type(old) is type(section) else old for old in self.features))

    def optional(self, name: str) -> Any:
        """The value of a feature's setting ``name``; None if this package does not have the feature."""
        section = self._section_with(name)
        return None if section is None else getattr(section, name)

    def sections(self) -> dict[str, Any]:
        """The sections by name: those of the core, then those of the features."""
        return {name: getattr(self, name) for name in core_sections()} | {
            name: self.section(section_type) for name, section_type in feature_sections().items()
        }

    def flat(self) -> dict[str, Any]:
        """All settings as one ``{name: value}``, without sections."""
        return {name: value for section in self.sections().values() for name, value in vars(section).items()}

    def value(self, name: str) -> Any:
        """The value of the setting ``name``."""
        return getattr(self._section_with(name), name)

    def _section_with(self, name: str) -> Any:
        """The section that has the setting or the property ``name``; None if there is none."""
        section_name = _sections_by_setting().get(name)
        if section_name is None:
            return next((section for section in self.sections().values() if hasattr(section, name)), None)
        section_type = feature_sections().get(section_name)
        return getattr(self, section_name) if section_type is None else self.section(section_type)

    @classmethod
    def of_sections(cls: type[Configuration], sections: Mapping[str, Any], **added_fields: Any) -> Configuration:
        """The inverse of ``sections``; ``added_fields``: further fields of a derived class."""
        core = {name: sections[name] for name in core_sections()}
        return cls(**core, features=tuple(sections[name] for name in feature_sections()), **added_fields)

    @classmethod
    def from_flat(cls: type[Configuration], values: dict[str, Any]) -> Configuration:
        """The inverse of ``flat``; ``KeyError`` for a name that is not a setting."""
        remaining = dict(values)
        sections = {}
        for section_name, section_type in section_types().items():
            known = {setting.name for setting in fields(section_type)}
            chosen = {name: remaining.pop(name) for name in list(remaining) if name in known}
            # YAML and JSON have only lists, and settings must be hashable.
            frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
            sections[section_name] = section_type(**frozen)
        if remaining:
            name = min(remaining)
            raise KeyError(f"{name} is not a setting; {perhaps(name, field_types())}")
        return cls.of_sections(sections)


@cached_for_features
def core_sections() -> dict[str, type[Any]]:
    """The class of each section of the core, with the settings that features add, by name."""
    kinds = get_type_hints(RunConfig)
    names = (section.name for section in fields(RunConfig) if section.name != "features")
    return {name: extended(kinds[name]) if extends(kinds[name]) else kinds[name] for name in names}


def _extended_by(section_type: type[Any]) -> str:
    """The name of the section of the core to which settings of a feature belong."""
    return next(name for name, core in core_sections().items() if issubclass(core, section_type))


@cached_for_features
def feature_sections() -> dict[str, type[Any]]:
    """The class of each section of a feature, by the feature's name."""
    kinds = {feature.name: feature.settings for feature in features() if feature.settings is not None}
    return {name: section_type for name, section_type in kinds.items() if not extends(section_type)}


def section_types() -> dict[str, type[Any]]:
    """The class of each section by name: those of the core, then those of the features."""
    return core_sections() | feature_sections()


@cached_for_features
def settings() -> dict[str, Setting]:
    """The declaration of every setting by name."""
    return dict(chain.from_iterable(map(declarations, section_types().values())))


@cached_for_features
def aliases() -> dict[str, str]:
    """The setting of each other name of a flag, in releases of Megatron-LM or its forks."""
    return {alias: name for name, declared in settings().items() for alias in declared.aliases}


@cached_for_features
def field_types() -> dict[str, Any]:
    """The type of every setting by name."""
    return dict(chain.from_iterable(get_type_hints(section).items() for section in section_types().values()))


@cached_for_features
def _sections_by_setting() -> dict[str, str]:
    """The name of the section of each setting."""
    return {setting.name: name for name, section_type in section_types().items() for setting in fields(section_type)}


def names_in_any_model() -> set[str]:
    """The settings of features that also apply to a model of the caller."""
    return {name for feature in features() if feature.in_any_model for name in setting_names(feature)}


@dataclass(frozen=True, kw_only=True)
class RunContext(RunConfig):
    """A configuration on a number of ranks and a kind of device, for the conditions of settings."""

    world_size: int = 1
    """Number of ranks."""
    device: str = "cpu"
    """Kind of device."""

    @property
    def attention(self) -> AttentionKind:
        """The kind of attention of all layers."""
        return attention_of(self.model)

    @property
    def corrects_bias(self) -> bool:
        """Whether the optimizer may correct the bias of its moments."""
        compression = compression_of(self.parallel)
        return compression is None or compression.has_bias_correction

    @property
    def data_ranks(self) -> int:
        """Ranks over which the gradients of dense layers, or of experts if they are more, are summed."""
        size = self.world_size // self.num_groups
        copies = self.parallel.data_parallel_size(size) * self.parallel.context_parallel_size
        return max(copies, size // self.parallel.expert_model_size if self.optional("num_experts") else 1)

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the experts of a layer are split."""
        return self.parallel.expert_model_parallel_size * self.parallel.expert_tensor_size
