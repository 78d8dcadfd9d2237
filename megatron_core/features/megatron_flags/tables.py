"""Flags of Megatron-LM's launch scripts that are not settings here.

Flags that are fields of ``RunConfig`` have Megatron-LM's meaning; other names of a flag are at its field. All other
flags are in ``tables.yaml``, grouped by reason; ``docs/megatron_flags.md`` shows them.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
ACCEPTED: dict[str, str] = _TABLES["accepted"]
DEPENDENT: dict[str, str] = _TABLES["dependent"]
REFUSED: dict[str, str] = _TABLES["refused"]
SAME_AS, OVERRIDDEN_BY_FLAG, VALUE_MEANS, ONLY_VALUE, LEFT_OUT = (
    {name: words.split() for name, words in _TABLES[table].items()}
    for table in ("same_as", "overridden_by_flag", "value_means", "only_value", "left_out")
)
SAME_VALUE: dict[str, dict[str, str]] = _TABLES["same_value"]
OTHER_DEFAULTS: dict[str, tuple[str, str]] = {name: tuple(pair) for name, pair in _TABLES["other_defaults"].items()}
FURTHER_VALUES: dict[str, str] = _TABLES["further_values"]
TOGETHER: dict[str, str] = _TABLES["together"]
UNREAD_WITH: dict[str, str] = _TABLES["unread_with"]
UNREAD_WITHOUT = {name: settings.split() for name, settings in _TABLES["unread_without"].items()}
LISTS = frozenset(_TABLES["lists"].split())
OF_OTHER_PROGRAMS: dict[str, str] = _TABLES["of_other_programs"]


@dataclass(frozen=True)
class Family:
    """Flags without effect that belong together."""

    loses: str
    """The loss of a user who gives these flags."""
    reasons: tuple[str, ...]
    """The reasons in ``ACCEPTED``."""


@dataclass(frozen=True)
class Flag:
    """The treatment of a flag that is not a setting of this project."""

    fate: Literal["accepted", "dependent", "refused"]
    """accepted: changes nothing. dependent: changes nothing without another flag. refused: an error."""
    reason: str
    """accepted: the reason. dependent: the flag on which it depends. refused: the missing feature, and an
    alternative."""
    takes_values: bool
    """Whether it has a value, unlike a switch."""


FATES: tuple[Literal["accepted", "dependent", "refused"], ...] = ("accepted", "dependent", "refused")
FLAGS = {
    word.rstrip("="): Flag(fate, reason, word.endswith("="))
    for fate in FATES
    for reason, words in _TABLES[fate].items()
    for word in words.split()
}
"""All flags that are not settings, by name."""
FAMILIES = {
    name: Family(family["loses"], tuple(dict.fromkeys(FLAGS[flag].reason for flag in family["of"].split())))
    for name, family in _TABLES["families"].items()
}
"""The reasons in ``ACCEPTED`` by family."""
