"""Declaration of a setting: its default, legal values, conditions, rule for resumed runs and other flag names.

A setting is a field of a configuration class::

    seq_length: int = setting(64, ranges.SIZE, when=ALWAYS, aliases="encoder_seq_length")
    \"\"\"Tokens in a training sequence.\"\"\"

The type, the name (Megatron-LM's flag) and the help text below it complete the declaration.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, TypeVar

from megatron_core.config.ranges import Range
from megatron_core.feature import extended, extends

T = TypeVar("T")


@dataclass(frozen=True)
class Condition:
    """A condition under which a run reads a setting."""

    words: str
    """The flag, or the property of the run, that the setting requires; with ``excludes`` the one that it excludes."""
    holds: Callable[[Any], object]
    """Whether a run, a ``RunContext``, reads the setting. (Any: the module of ``RunContext`` imports this one.)"""
    excludes: bool = False
    """Whether ``words`` is present when the condition does not hold."""
    switch: str | None = None
    """The setting that must be given, for conditions of ``given``."""


Difference = Callable[[Any, Any], tuple[str, Sequence[object]] | None]
"""From the ``RunConfig`` of a run and of its checkpoint to words and the places in which they differ, none if the
values mean the same; None: the values themselves are compared."""

ALWAYS = Condition("", lambda run: True)
"""No other setting, and no number of ranks or device, leaves the setting without effect."""
BY_RULE = Condition("", lambda run: True)
"""A rule in ``rules_*.py`` refuses the setting where it would have no effect."""


def given(name: str, value: str = "") -> Condition:
    """The condition that the setting ``name`` is neither false, 0 nor absent; ``value`` is an example of its value."""
    words = f"--{name.replace('_', '-')} {value}".rstrip()
    return Condition(words, lambda run: run.optional(name), switch=name)


def unless(words: str, is_so: Callable[[Any], object]) -> Condition:
    """The condition that a run is not as ``words`` and ``is_so`` say."""
    return Condition(words, lambda run: not is_so(run), excludes=True)


def without(name: str) -> Condition:
    """The condition that the setting ``name`` of an optional feature is not given."""
    return unless(f"--{name.replace('_', '-')}", lambda run: run.optional(name))


class Resume(Enum):
    """The consequence of a setting that differs from the checkpoint from which a run resumes."""

    FREE = auto()
    """None: the setting determines how results are computed, or where they are written, but not their values."""
    REPORTED = auto()
    """A note: the setting changes the numerical results of training, but neither the model nor the schedule."""
    TOKENS = auto()
    """A note, as REPORTED. The setting describes the tokens; ``--use-checkpoint-args`` takes it from the checkpoint."""
    SCHEDULE = auto()
    """An error without ``--override-opt-param-scheduler``: the setting defines learning rates or weight decay."""
    INITIAL = auto()
    """None: the setting determines initial weights."""
    SHAPE = auto()
    """An error if shapes of tensors differ: the setting has a derived default, so that its values are not compared."""
    FUNCTION = auto()
    """An error without ``--changed-model-settings``: with another value the weights compute another function."""
    TENSORS = auto()
    """An error: the setting determines which tensors exist."""


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting, except type, default and help text."""

    legal: Range | None
    """Legal numbers; None: the type alone decides."""
    needs: tuple[Condition, ...]
    """Conditions without which any value but the default is refused."""
    when: tuple[Condition, ...]
    """Conditions without which the setting has no effect; a note names it then."""
    resume: Resume | None
    """The consequence of another value in a resumed run; None: the default of the section."""
    aliases: tuple[str, ...]
    """Other names of the flag, in releases of Megatron-LM or its forks."""
    is_refinement: bool = False
    """Whether it refines the mode of ``needs``, such as its number of layers, a factor or a dtype."""
    # Megatron-LM ignores a refinement without the mode, so that its flag is left out with a note; so are CUDA graphs,
    # which change only speed. Any other setting is refused without its mode: the run would train another model than
    # its flags say, on other data or from other weights, or Megatron-LM refuses it, too.
    difference: Difference | None = None
    """Compares the values of a run and of its checkpoint by their meaning, such as texts with equal contents."""


def setting(
    default: T,
    legal: Range | None = None,
    *,
    needs: Condition | tuple[Condition, ...] = (),
    when: Condition | tuple[Condition, ...] = (),
    resume: Resume | None = None,
    aliases: str = "",
    is_refinement: bool = False,
    difference: Difference | None = None,
) -> T:
    """A field of a configuration class; see ``Setting`` for the arguments, ``aliases`` are separated by spaces.

    Every field needs ``needs`` or ``when``, its own or its section's: ``ALWAYS`` if it is read in every run.
    """
    declared = Setting(legal, _tuple(needs), _tuple(when), resume, tuple(aliases.split()), is_refinement, difference)
    return field(default=default, metadata={"setting": declared})


def section(
    *, needs: Condition | None = None, when: Condition | None = None, resume: Resume = Resume.FREE
) -> Callable[[type[T]], type[T]]:
    """Class decorator below ``@dataclass``: conditions and rule for resumed runs that all fields of the class share.

    The field that switches the section on does not get its own condition. ``resume`` is the default of the fields.
    """

    def decorate(section_type: type[T]) -> type[T]:
        for name, attribute in vars(section_type).items():
            if isinstance(attribute, Field):
                declared: Setting = attribute.metadata["setting"]
                shared = replace(
                    declared,
                    needs=tuple(c for c in (needs, *declared.needs) if c and c.switch != name),
                    when=tuple(c for c in (when, *declared.when) if c and c.switch != name),
                    resume=declared.resume or resume,
                )
                attribute.metadata = MappingProxyType({"setting": shared})
        return section_type

    return decorate


def declarations(section_type: Any) -> Iterator[tuple[str, Setting]]:
    """The name and declaration of each setting of a section, with those that features add to it."""
    declared = fields(extended(section_type) if extends(section_type) else section_type)
    return ((setting.name, setting.metadata["setting"]) for setting in declared)


def names_by_resume(section_type: Any, *rules: Resume) -> tuple[str, ...]:
    """The settings of a section with one of these rules for resumed runs."""
    return tuple(name for name, declared in declarations(section_type) if declared.resume in rules)


def _tuple(conditions: Condition | tuple[Condition, ...]) -> tuple[Condition, ...]:
    return conditions if isinstance(conditions, tuple) else (conditions,)
