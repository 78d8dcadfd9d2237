"""The flags of a command line, by settings, with messages for flags that cannot be used.

Features read the flags of other programs, and values that stand for several settings, before the flags of settings
are read.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_core.config.run import aliases
from megatron_core.config.values import convert, describe_type, perhaps
from megatron_core.feature import feature_switches, features, load_hook, shorthands

Group = tuple[str, list[str]]
"""A flag, with its hyphens, and its values."""
OFF = ("false", "0", "no", "off")
"""Values that turn a switch off in other programs."""


def command_line() -> dict[str, type[str] | type[bool]]:
    """The flags of every command line that name the source of settings or choose some, and their types."""
    return {"config": str} | dict.fromkeys(shorthands(), str) | dict.fromkeys(feature_switches(), bool)


class Spellings:
    """Flags of a command line, and entries of a file, that stand for settings with other names or values.

    A feature names a derived class in its hook ``spellings``. An object reads one command line or one file. A method
    that is not overridden leaves everything to the following spellings and to the settings themselves.
    """

    names: Collection[str] = ()
    """Names of flags that it reads, with underscores, for hints at similar names."""
    groups: list[Group]
    """The flags of the command line, after ``replace`` of all spellings."""

    def replace(self, groups: list[Group]) -> list[Group]:
        """The flags of a command line, after the replacement of flags whose meaning depends on others."""
        return groups

    def read(self, flag: str, values: list[str], line: "Translation") -> Iterable[Group]:
        """Add the meaning of a flag to ``line``; return the flags that are still to be read, usually it or none."""
        return [(flag, values)]

    def entry(self, name: str, value: Any) -> tuple[str, Any]:
        """The setting and the value of an entry of a file. Errors: ``ConfigError``."""
        return name, value

    def implied(self, name: str, value: Any) -> tuple[Any, dict[str, Any]]:
        """The value of a setting in a file, and the further settings that it implies."""
        return value, {}

    def explain(self, name: str) -> tuple[str, str] | None:
        """For a name that is not a setting: the program that has it, such as "Megatron-LM's", and what to do."""
        return None


def spellings_of_features() -> list[Spellings]:
    """New objects of all features, in the order of the features."""
    return [load_hook(feature.spellings)() for feature in features() if feature.spellings is not None]


@dataclass
class Translation:
    """A command line in this project's flags."""

    known: Mapping[str, Any]
    """The settings and their types."""
    weak: list[str] = field(default_factory=list)
    """Flags that the flags in ``strong`` override."""
    strong: list[str] = field(default_factory=list)
    """The other flags, in their order."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Flags without effect, and the reason."""
    faults: list[str] = field(default_factory=list)
    """A message for each flag that cannot be used."""
    unknown: list[str] = field(default_factory=list)
    """Flags of neither project, and words that belong to no flag; each has a message in ``faults``, too."""

    @property
    def flags(self) -> list[str]:
        """All flags that can be used."""
        return self.weak + self.strong

    @classmethod
    def of(cls, words: list[str], known: Mapping[str, Any]) -> "Translation":
        """Translate ``words``; ``known`` has the type of each setting."""
        line = cls(known)
        for _, translation in cls.each(words, known):
            line.weak += translation.weak
            line.strong += translation.strong
            line.ignored |= translation.ignored
            line.faults += translation.faults
            line.unknown += translation.unknown
        return line

    @classmethod
    def each(cls, words: list[str], known: Mapping[str, Any]) -> "Iterator[tuple[list[str], Translation]]":
        """Each flag of ``words`` with its values, and its translation."""
        groups = grouped(words)
        spellings = spellings_of_features()
        for spelling in spellings:
            groups = spelling.replace(groups)
        for spelling in spellings:
            spelling.groups = groups
        for flag, values in groups:
            translation = cls(known)
            translation._add(flag, values, spellings)
            yield [flag, *values], translation

    def has(self, name: str) -> bool:
        """Whether the flag ``name``, with underscores, is that of a setting, or turns one off or on."""
        return name in self.known or name in aliases() or f"no_{name}" in self.known or self._is_switched_off(name)

    def _add(self, flag: str, values: list[str], spellings: Sequence[Spellings]) -> None:
        """Translate one flag with its values."""
        if not flag.startswith("--"):
            self.unknown.append(flag)
            self.faults.append(f"{' '.join([flag, *values])}: this belongs to no flag; remove it")
        elif flag == "--":
            self.faults += [f"{value}: this belongs to no flag; remove it" for value in values]
        else:
            groups: list[Group] = [(flag, values)]
            for spelling in spellings:
                groups = [unread for group in groups for unread in spelling.read(*group, self)]
            for group in groups:
                self._add_flag(*group, spellings)

    def _add_flag(self, flag: str, values: list[str], spellings: Iterable[Spellings]) -> None:
        """Read a flag of a setting; any other one is unknown."""
        name = plain(flag)
        if name in self.known:
            self.add_setting(flag, name, values)
        elif f"no_{name}" in self.known:  # --load-optim overrides no_load_optim: true in the --config file
            self.add_switch(flag, [f"--no-no-{name.replace('_', '-')}"], values)
        elif self._is_switched_off(name):
            self.add_switch(flag, [flag], values)
        elif name in aliases():
            self.add_setting(to_flag(aliases()[name]), aliases()[name], values)
        else:
            explanations = (spelling.explain(name) for spelling in spellings)
            explanation = next((text for text in explanations if text is not None), None)
            if explanation is None:
                names = {*self.known, *aliases()}.union(*(spelling.names for spelling in spellings))
                hint = perhaps(name, names, "--")
            else:
                hint = f"in place of {explanation[0]} flag, {explanation[1]}"
            self.unknown.append(flag)
            self.faults.append(
                f"{' '.join([flag, *values])}: neither a flag of this project nor of Megatron-LM; {hint}"
            )

    def _is_switched_off(self, name: str) -> bool:
        return any(name.startswith("no_" * count) and self.known.get(name[3 * count :]) is bool for count in (1, 2))

    def add_setting(self, flag: str, name: str, values: list[str]) -> None:
        """Add a setting with its values, or a fault if they are not legal."""
        setting_type, single = self.known[name], values
        try:
            if setting_type is bool:
                self.add_switch(flag, [flag], values)
                return
            if "tuple[int" in str(setting_type) and len(values) == 1:
                values = values[0].split()  # in quotes
            value = convert(values if _is_list(setting_type) else only(values), setting_type)
            values = values if isinstance(value, tuple) else [str(value)]  # 1e3 for an integer
            if setting_type == str | None and values[0].startswith("-"):  # a pattern of layers
                flag, values = f"{flag}={values[0]}", []
        except (TypeError, ValueError, OverflowError):
            many = len(single) > 1 and not _is_list(setting_type)
            legal = describe_type(setting_type, "None") + (", one value (in quotes if it has spaces)" if many else "")
            fault = "this cannot be read" if single else "a value is missing"
            self.faults.append(f"{' '.join([flag, *single])}: {fault}; legal: {legal}")
        else:
            self.strong += [flag, *values]

    def add_switch(self, flag: str, meaning: Iterable[str], values: list[str]) -> None:
        """Add the flags ``meaning`` of a switch, or a fault if it has values."""
        if values:
            remedy = "remove the value"
            if len(values) == 1 and values[0].lower() in OFF:
                remedy = f"to turn it off, give {to_flag('no_' + plain(flag).removeprefix('no_'))}"
            self.faults.append(f"{flag} {' '.join(values)}: this is a switch; {remedy}")
        else:
            self.strong += meaning


def plain(flag: str) -> str:
    """A flag as a name: ``--data-path`` is ``data_path``."""
    return flag[2:].replace("-", "_")


def to_flag(name: str) -> str:
    """The inverse of ``plain``."""
    return f"--{name.replace('_', '-')}"


def grouped(words: list[str]) -> list[Group]:
    """Each flag with the values that follow it; ``--x=1`` is ``--x 1``, and quotes around values are removed."""
    groups: list[Group] = []
    for token in words:
        if token.startswith("--") or not groups:
            flag, equals, value = token.partition("=")
            groups.append((flag, [_unquoted(value)] if equals else []))
        else:
            groups[-1][1].append(_unquoted(token))
    return groups


def _unquoted(value: str) -> str:
    """Remove the quotes around a value; scripts may quote quotes, so that the shell does not remove them."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _is_list(setting_type: Any) -> bool:
    """Whether a setting of this type takes several values."""
    return "tuple" in str(setting_type)


def only(values: Collection[str]) -> str:
    """The only value. Errors: ``ValueError`` for none or several."""
    (value,) = values
    return value
