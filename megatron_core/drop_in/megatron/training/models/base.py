"""The base classes of configurations of models and of their builders."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Generic, TypeVar

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.training.config.allowlist import Serializable, dataclass_of_program
from megatron.training.config.instantiate_utils import resolve_target
from megatron_core.errors import ConfigError

Hook = Callable[[Any], Any]
"""Takes the list of a rank's chunks and returns a list."""
_HOOKS = ("pre_wrap_hooks", "post_wrap_hooks")

Model = TypeVar("Model", bound=MegatronModule)
Config = TypeVar("Config", bound="ModelConfig")


@dataclass
class ModelConfig:
    """The settings of a model, without the code that builds it: ``builder`` is the path of that class.

    ``pre_wrap_hooks`` change the list of chunks before they are wrapped for data parallelism, ``post_wrap_hooks``
    afterwards. ``restore_modelopt_state`` is not supported.
    """

    builder: ClassVar[str]

    restore_modelopt_state: bool = False
    extra_checkpoint_metadata: dict[str, Any] | None = None
    pre_wrap_hooks: list[Hook] = field(default_factory=list)
    post_wrap_hooks: list[Hook] = field(default_factory=list)

    def get_builder_cls(self) -> Any:
        """Return the class at the path ``builder``; ConfigError if it is not a ``ModelBuilder`` of the program."""
        for kind in _subclasses(ModelBuilder):
            if f"{kind.__module__}.{kind.__qualname__}" == self.builder:
                return kind
        found = resolve_target(self.builder, "builder")
        if not (isinstance(found, type) and issubclass(found, ModelBuilder)):
            raise ConfigError(f"builder={self.builder} is not a ModelBuilder; import its module first")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, but functions, hooks and private ones, with ``_target_`` and ``_builder_``."""
        return _fields_of(self) | {"_builder_": self.builder}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Any:
        """Return the configuration of a dictionary, without entries that are not fields.

        ``_target_`` names a dataclass that the allow-list of ``instantiate`` contains or that the program has imported.
        Raises ValueError without ``_target_``, and InstantiationException for other classes.
        """
        found = _restored(data)
        found.builder = data["_builder_"]
        return found


def _subclasses(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [each for child in children for each in (child, *_subclasses(child))]


def _fields_of(config: Any) -> dict[str, Any]:
    kind = type(config)
    found: dict[str, Any] = {"_target_": f"{kind.__module__}.{kind.__qualname__}"}
    for each in fields(config):
        value = getattr(config, each.name)
        if not (callable(value) or each.name.startswith("_") or each.name in _HOOKS):
            found[each.name] = _fields_of(value) if is_dataclass(value) else value
    return found


def _restored(data: dict[str, Any]) -> Any:
    target = data.get("_target_")
    if target is None:
        raise ValueError("the dictionary has no '_target_'; give it the path of the configuration's class")
    kind = dataclass_of_program(target) or resolve_target(target, "")
    if not is_dataclass(kind):
        raise ConfigError(f"_target_={target} is not a dataclass; name the class of a configuration")
    known = {each.name for each in fields(kind) if not each.name.startswith("_")}
    values = {name: value for name, value in data.items() if name in known}
    return kind(**{name: _restored(v) if isinstance(v, dict) and "_target_" in v else v for name, v in values.items()})


class ModelBuilder(abc.ABC, Generic[Model, Config]):
    """Builds the chunks of the model of a configuration."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    @abc.abstractmethod
    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> Model:
        """Return one chunk; ``pre_process`` and ``post_process`` add the embedding and the output layer."""

    @abc.abstractmethod
    def build_distributed_models(self, pg_collection: ProcessGroupCollection, *args: Any, **kwargs: Any) -> list[Model]:
        """Return this rank's chunks, wrapped for data parallelism; see ``unimodal_build_distributed_models``."""


def compose_hooks(hooks: list[Hook]) -> Hook:
    """Return a function that calls ``hooks`` in their order, each with the result of the one before."""

    def composed(model: Any) -> Any:
        for hook in hooks:
            model = hook(model)
        return model

    return composed
