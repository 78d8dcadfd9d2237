"""Sorts the flags of a command line of Megatron-LM by their treatment here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_core.config.flags import Translation, command_line, grouped, plain, to_flag
from megatron_core.config.run import RunConfig, aliases, field_types
from megatron_core.features.megatron_flags import tables


@dataclass
class LaunchFlags:
    """The flags of a command line, each with its values, by their treatment."""

    done: list[str] = field(default_factory=list)
    """Flags with the same name and meaning."""
    translated: dict[str, str] = field(default_factory=dict)
    """Flags with another name or value here."""
    ignored: dict[str, list[str]] = field(default_factory=dict)
    """Flags without effect, by reason."""
    refused: list[str] = field(default_factory=list)
    """A message for each flag that cannot be used."""
    unread: dict[str, str] = field(default_factory=dict)
    """Flags whose value is not known, so that they are left out, and the value's name."""
    usable: list[str] = field(default_factory=list)
    """The words of all other flags."""

    @classmethod
    def of(cls, words: Sequence[str], unknown: Any) -> "LaunchFlags":
        """Sort ``words``; ``unknown``: the pattern of a value that is not known, with its name as group 1."""
        sorted_flags = cls()
        kinds = field_types() | command_line()
        split_words = [word for flag, values in grouped(list(words)) for word in (flag, *values)]
        strong = {plain(flag) for flag, _ in grouped(Translation.of(split_words, kinds).strong)}
        for group, translation in Translation.each(split_words, kinds):
            names = unknown.findall(" ".join(group))
            text = unknown.sub(r"<\1>", " ".join(group))
            if names and translation.faults and not _is_refused(group[0], translation):
                sorted_flags.unread[text] = ", ".join(names)
            elif translation.faults:
                sorted_flags.refused += [unknown.sub(r"<\1>", fault) for fault in translation.faults]
            elif (
                not translation.strong
                and translation.weak
                and {plain(flag) for flag, _ in grouped(translation.weak)} <= strong
            ):
                sorted_flags.ignored.setdefault("other flags of the command line override it", []).append(text)
            elif translation.ignored:
                for reason in translation.ignored.values():
                    sorted_flags.ignored.setdefault(reason, []).append(text)
            else:
                sorted_flags._add(group, translation.flags, text)
            if not (names and translation.faults):
                sorted_flags.usable += [unknown.sub(r"<\1>", word) for word in group]
        return sorted_flags

    def _add(self, group: list[str], flags: list[str], text: str) -> None:
        same = [plain(flag) for flag in group[:1]] == [plain(flag) for flag in flags[:1]] and len(flags) == len(group)
        same = same and all(_equal(old, new) for old, new in zip(group[1:], flags[1:], strict=True))
        if same:
            self.done.append(text)
        else:
            remark = ", which Megatron-LM does only for a checkpoint of ModelOpt or with a teacher"
            is_conditional = plain(group[0]) in tables.UNREAD_WITHOUT
            self.translated[text] = (" ".join(flags) or "the default") + remark * is_conditional

    def set_names(self) -> set[str]:
        """The names of the settings that the command line gives, and of its other flags."""
        return {aliases().get(name := plain(word), name) for word, _ in grouped(self.usable)}

    def different_defaults(self, config: RunConfig) -> dict[str, str]:
        """Flags that the command line leaves out and whose defaults are Megatron-LM's with another value, with the text
        of the difference."""
        set_names = self.set_names()
        values = config.flat()
        return {
            f"{to_flag(name)} {theirs}": f"here {values[name]}: {text}"
            for name, (theirs, text) in tables.OTHER_DEFAULTS.items()
            if name not in set_names and str(values[name]) != theirs
        }


def is_flag(word: str) -> bool:
    """Whether ``word`` is a flag of Megatron-LM's training programs or of this one."""
    name = plain(word.partition("=")[0])
    known = (field_types(), tables.FLAGS, aliases(), tables.SAME_AS)
    return word.startswith("--") and any(name in table for table in known)


def _is_refused(flag: str, translation: Translation) -> bool:
    """Whether ``flag`` cannot be used with any value, rather than because its value is not known."""
    entry = tables.FLAGS.get(plain(flag))
    name = plain(flag)
    is_refused = entry is not None and entry.fate == "refused" and name not in tables.ONLY_VALUE
    return flag.startswith("--") and (is_refused or bool(translation.unknown))


def _equal(old: str, new: str) -> bool:
    try:
        return old == new or float(old) == float(new)
    except ValueError:
        return False
