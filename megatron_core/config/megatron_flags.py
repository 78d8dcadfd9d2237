"""What becomes of the other flags that a launch script for Megatron-LM may contain.

Flags that are fields of ``RunConfig`` have Megatron-LM's meaning. All others are in ``megatron_flags.yaml``, with
what is said about them, so that one reason is written once; ``docs/megatron_flags.md`` shows all of it.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config.run import settings
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
ACCEPTED: dict[str, str] = _TABLES["accepted"]
DEPENDENT: dict[str, str] = _TABLES["dependent"]
REFUSED: dict[str, str] = _TABLES["refused"]
SAME_AS, OVERRIDDEN_BY_FLAG, VALUE_MEANS, ONLY_VALUE = (
    {name: words.split() for name, words in _TABLES[table].items()}
    for table in ("same_as", "overridden_by_flag", "value_means", "only_value")
)
RENAMED = {alias: name for name, declared in settings().items() for alias in declared.aliases}
SAME_VALUE: dict[str, dict[str, str]] = _TABLES["same_value"]
LISTS = frozenset(_TABLES["lists"].split())


@dataclass(frozen=True)
class Flag:
    """What becomes of a flag that is not a setting of this project."""

    fate: Literal["accepted", "dependent", "refused"]
    """accepted: changes nothing. dependent: changes nothing without another flag. refused: an error."""
    reason: str
    """Why it changes nothing; the flag on which it depends; or what is missing, with the way out."""
    takes_values: bool
    """Whether it is no switch."""


FATES: tuple[Literal["accepted", "dependent", "refused"], ...] = ("accepted", "dependent", "refused")
FLAGS = {
    word.rstrip("="): Flag(fate, reason, word.endswith("="))
    for fate in FATES
    for reason, words in _TABLES[fate].items()
    for word in words.split()
}
"""Every other flag by name."""
