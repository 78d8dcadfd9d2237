"""How an optional feature registers itself with the core.

A run can do without a feature. A feature is a folder with an object ``Feature``, whose hooks the core calls; the core
imports no feature. ``megatron_core/features`` lists the features of this package; a program adds
others with ``register_feature`` before it reads its settings.

A hook that needs torch is a string, ``"package.module:name"``, and is imported when a run uses the feature.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from megatron_core.errors import ConfigError

Section = TypeVar("Section")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Shorthand:
    """A flag whose value, such as a file of another program, stands for settings."""

    help: str
    settings: Callable[[str, Collection[str]], tuple[dict[str, Any], str]]
    """From the value, and the names of all settings that flags and the file give, to settings, which become defaults,
    and a note or ""; ``ConfigError`` for other values."""


@dataclass(frozen=True)
class Switch:
    """A switch that chooses settings for the configuration of all other flags, such as --as-megatron."""

    help: str
    settings: str
    """Hook: a function from the ``RunConfig`` of the other flags, and the names of the flags without effect here, to
    settings. They replace defaults, but no flag and no entry of a file."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """The hooks of a feature. A hook that is None does nothing."""

    name: str
    """The name of its folder, and of its section of settings in files and in ``--help``."""
    settings: type[Any] | None = None
    """A frozen dataclass of ``setting`` fields (``config/setting.py``): its section, or, if it derives from a section
    of the core such as ``ModelConfig``, settings of that section."""
    is_used: Callable[[Any], bool]
    """Whether a run with this ``RunConfig`` uses the feature."""
    problems: Callable[[Any, int], Iterable[str]] | None = None
    """Its rules: messages about a ``RunConfig`` that uses the feature on a number of ranks, each with a correction."""
    resume_problems: Callable[[Mapping[str, Any], Any, Path], Iterable[str]] | None = None
    """Its rules for a run that resumes: messages about the stored settings, the ``RunConfig`` of the run, and the
    checkpoint's folder; called whether or not the run uses the feature."""
    describe: Callable[[Any], str] | None = None
    """From a ``RunConfig`` that uses the feature to a line in the description of the run, or ""."""
    shorthands: Mapping[str, Shorthand] = field(default_factory=dict)
    """Flags, by names with underscores, that stand for settings."""
    switches: Mapping[str, Switch] = field(default_factory=dict)
    """Flags without a value, by names with underscores, that choose settings."""
    spellings: str | None = None
    """Class derived from ``config.flags.Spellings``: flags, and entries of files, that it reads as settings."""
    layers: Mapping[str, str] = field(default_factory=dict)
    """Hooks: the layer of each kind of attention or recurrence that it adds, by its name in ``attention_kinds``,
    constructed as ``transformer.attention.SelfAttention``, and of each of ``feed_forwards``, constructed as
    ``transformer.mlp.MLP``, but with the number of the layer. Further names: "multi_token", the layers after the last
    one, whose losses ``models.gpt.model`` adds; "tiled_attention", the core attention of sequences over several ranks;
    "fused_attention", kernels of ``transformer.core_attention``; "linear", in place of attention or the MLP; and those
    of ``ModelConfig.head_name``, heads constructed as ``models.gpt.model.VocabularyHead``."""
    attention_kinds: Mapping[str, str] = field(default_factory=dict)
    """Hooks: classes derived from ``config.attention.AttentionKind``, with the sizes of the layers, by the names that
    ``ModelConfig.attention_name`` or ``recurrence_of`` returns; "attention_and_NAME" is the kind of a layer with both.
    """
    feed_forwards: Mapping[str, str] = field(default_factory=dict)
    """Hooks: classes derived from ``config.linear_layers.FeedForward``, with the sizes of the layers that have them in
    place of an MLP, by the names that ``ModelConfig.feed_forward_name`` returns."""
    compressions: tuple[Any, ...] = ()
    """Rows ``config.parallel.CompressionKind``: values of --grad-compression that it implements."""
    optimizers: tuple[Any, ...] = ()
    """Rows ``config.optimizers.OptimizerKind``: values of --optimizer that it implements."""
    tokenizers: tuple[Any, ...] = ()
    """Rows ``config.data.TokenizerKind``: values of --tokenizer-type that it implements."""
    schedules: tuple[Any, ...] = ()
    """Rows ``schedules.table.Schedule``: values of --pipeline-schedule, and their forms in pairs."""
    turns: Mapping[str, str] = field(default_factory=dict)
    """Hooks: context managers around the list of a rank, from the ``pipeline_parallel.executor.Executor`` to the
    ``RunTurn`` of turns of other kinds than F and B: "I" and "W" for actions, "FB" for pairs."""
    kernel_backends: str | None = None
    """Hook: a mapping from values of --kernel-backend to objects with functions of ``ops.reference``, and with
    ``title``, ``modules``, ``PARTIAL_OPS``, ``unavailable_reason`` and ``supports_call`` as ``Library`` of
    ``nvidia_libraries``."""
    rank_monitor: str | None = None
    """Hook: a class ``parallel.world.RankMonitor``, constructed when a rank joins others with the store, the rank, the
    number of ranks, the seconds without progress after which a rank is reported, and the exit status of its process;
    in every program."""
    transports: Mapping[str, str] = field(default_factory=dict)
    """Modules with the functions of ``parallel.transports.Transport``, by the value of --distributed-backend."""
    checkpoint_formats: tuple[Any, ...] = ()
    """Rows ``config.checkpoint.FormatRow``: formats of checkpoints of other programs."""
    fast_restarts: Mapping[str, str] = field(default_factory=dict)
    """Hooks: classes derived from ``training.fast_restarts.FastRestarts``, by the value of --non-persistent-ckpt-type.
    """
    draw_weights: str | None = None
    """Hook: a function as ``features.device_draws.draws.fill_normal``, which draws initial weights on their device."""
    saver: str | None = None
    """Hook: class derived from ``training.saving.CheckpointSaver``, in its place."""
    urls: str | None = None
    """Hook: class derived from ``locations.ObjectPath``, constructed with a URL, for the places that URLs name."""
    token_files: str | None = None
    """Hook: a function from the prefix of a token file to what training reads in its place, or None."""
    in_any_model: bool = False
    """Whether ``initialize`` of a model of the caller also reads its settings."""
    arithmetic: str | None = None
    """Hook: a function from the ``RunConfig``, the group over which sequences are split, and the number of
    data-parallel ranks to the ``tensor_parallel.arithmetic.LayerArithmetic`` of the layers."""
    change_stage: str | None = None
    """Hook: a function from the ``RunConfig``, a stage of the model, and the groups, which freezes parameters or adds
    parts when the stage has been built; with ``initialise`` it draws the weights of its parts."""
    added_weights: str | None = None
    """Class derived from ``training.parts.AddedWeights``: parameters that it adds to a model trained without them."""
    added_tensors: str | None = None
    """Hook: a function from the ``RunConfig``, a ``ParallelConfig``, and the number of a layer to the
    ``config.linear_layers.AddedTensor`` of the layer, which are all that a run trains."""
    check_device: str | None = None
    """Hook: a function from the ``RunConfig`` and the device that raises ``ConfigError`` if the rank cannot compute
    what the feature needs; called on all ranks before the model is built."""
    convert_layers: str | None = None
    """Hook: a function from the ``RunConfig``, the ``TransformerBlock`` of a stage, which it changes, and the device;
    it returns a sentence about parts that stay as they were, or ""."""
    memory: str | None = None
    """Hook: a function from a ``data_parallel.BucketMemory``, the ``RunConfig`` and the rank; it returns another one,
    which places weights and optimizer state outside of the device."""
    objective: str | None = None
    """Class derived from ``training.objective.Objective``: the loss of a run, instead of the mean over tokens."""
    evaluation: str | None = None
    """Class derived from ``training.parts.Evaluation``: what the run evaluates in addition to its validation data."""
    data_part: str | None = None
    """Class derived from ``training.data.DataPart``: a kind of data, an order of samples, or changes of samples."""
    run_part: str | None = None
    """Class derived from ``training.parts.RunPart``: the feature's objects in a training run, constructed with it."""
    start: str | None = None
    """Hook: ``training.pretrain.start_once`` of this feature, which joins the ranks and trains. A run has one."""
    sink: str | None = None
    """Hook: a function from a ``monitor.sinks.SinkContext`` to a ``monitor.events.Sink``, which receives the metrics of
    each step and each evaluation on the first rank."""
    shown_losses: tuple[str, ...] = ()
    """Auxiliary losses that the line of a step shows directly after the loss."""
    callbacks: tuple[str, ...] = ()
    """Classes derived from ``training.callbacks.Callback``, constructed with the ``Run``: code that runs between the
    steps of a training."""


def cached_for_features(compute: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Cache the results of a function of all features until a program registers another one."""

    cached: Any = cache(lambda added, *args, **named: compute(*args, **named))

    @wraps(compute)
    def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        return cached(tuple([(feature.name, feature.settings) for feature in _ADDED.values()]), *args, **named)

    return call


class Extensible:
    """Base class of a section of the core to which features add settings.

    A feature's ``settings`` derive from the section, as ``class FP8Config(TrainingConfig)``. They may override its
    methods, and call ``super()``. Every object of the section has the settings of all features: users read and replace
    them as ``config.training.fp8_format``, and ``section`` gives the object the type of one feature.
    """

    # All features share one object, as the parts of a class with mixins, because a setting of the core may depend on
    # those of several features: which layers have attention, on a pattern and on sizes of single layers.
    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **values: Any) -> Any:
            return super().__new__(extended(cls))

    def __reduce__(self) -> tuple[Any, ...]:
        # Extended classes are made in each process: a pickle names the class from which another process makes its own.
        core = _core_of(type(self))
        return _restored, (core if extended(core) is type(self) else type(self), vars(self))

    def section(self, kind: type[Section]) -> Section:
        """This object, as an object of a feature's settings."""
        if isinstance(self, kind):
            return self
        return extended(kind)(**vars(self))  # made before a program registered the feature


def _restored(kind: type[Section], values: dict[str, Any]) -> Section:
    return kind(**values)


def extends(settings: type[Any] | None) -> bool:
    """Whether settings of a feature belong to a section of the core."""
    return settings is not None and issubclass(settings, Extensible)


def _core_of(kind: type[Any]) -> type[Any]:
    """The section of the core from which a class derives."""
    return next(base for base in kind.__mro__ if Extensible in base.__bases__)


def extended(kind: type[Section]) -> type[Section]:
    """The class of the objects of a section of the core, from it or from settings of a feature that derive from it."""
    core: Any = _core_of(kind)
    added = _settings_added_to(core)
    if not added or kind not in (core, *added):
        return kind
    return _with_bases(core, added)


@cached_for_features
def _settings_added_to(core: Any) -> tuple[type[Any], ...]:
    return tuple(feature.settings for feature in features() if feature.settings and issubclass(feature.settings, core))


@cache
def _with_bases(core: type[Any], added: tuple[type[Any], ...]) -> Any:
    names = {name: getattr(core, name) for name in ("__doc__", "__module__", "__qualname__")}
    return dataclass(frozen=True, kw_only=True)(type(core.__name__, added, names))


_ADDED: dict[str, Feature] = {}
"""Features that programs have registered, by name."""


def features() -> tuple[Feature, ...]:
    """All features: those of this package in the order of their list, then those that programs have registered."""
    return (*_listed_features(), *_ADDED.values())


@cache
def _listed_features() -> tuple[Feature, ...]:
    # By name, because the features import the core.
    return import_module("megatron_core.features").FEATURES


def register_feature(feature: Feature) -> None:
    """Add a feature of a program.

    Errors: ``ConfigError`` if another feature has its name or one of its settings.
    """
    own_names = setting_names(feature)
    for other in features():
        if other.name == feature.name:
            raise ConfigError(f"feature {feature.name!r} is already registered; choose another name")
        common = sorted(own_names & setting_names(other))
        if common:
            raise ConfigError(
                f"feature {feature.name!r} has the settings {', '.join(common)} of feature {other.name!r}; rename them"
            )
    _ADDED[feature.name] = feature


def setting_names(feature: Feature) -> set[str]:
    """The names of the settings of a feature."""
    if feature.settings is None:
        return set()
    core_settings = fields(_core_of(feature.settings)) if extends(feature.settings) else ()
    return {setting.name for setting in fields(feature.settings)} - {setting.name for setting in core_settings}


def layer_hooks() -> dict[str, str]:
    """The hooks of all layers that features add, by the names of their kinds."""
    return {name: hook for feature in features() for name, hook in feature.layers.items()}


def shorthands() -> dict[str, Shorthand]:
    """The flags of all features that stand for settings, by name."""
    return {name: flag for feature in features() for name, flag in feature.shorthands.items()}


def feature_switches() -> dict[str, Switch]:
    """The switches of all features that choose settings, by name."""
    return {name: switch for feature in features() for name, switch in feature.switches.items()}


def used_features(config: Any) -> tuple[Feature, ...]:
    """The features that a run with this configuration uses."""
    return tuple(feature for feature in features() if feature.is_used(config))


def descriptions(config: Any) -> list[str]:
    """The lines of the features that a run with this configuration uses in its description."""
    lines = [feature.describe(config) for feature in used_features(config) if feature.describe is not None]
    return [line for line in lines if line]


def load_hook(hook: str) -> Any:
    """Import the object that a hook names."""
    return resolve_name(hook)
