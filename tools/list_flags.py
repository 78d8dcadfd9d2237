"""Print how every flag in a launch script for Megatron-LM is handled: docs/megatron_flags.md.

python tools/list_flags.py > docs/megatron_flags.md
"""

from __future__ import annotations

import typing

from megatron_core.commands.start import run_tool
from megatron_core.config.flags import command_line
from megatron_core.config.run import aliases, section_types
from megatron_core.features.megatron_flags import tables as megatron_flags

HEAD = """# Flags of Megatron-LM

All flags of Megatron-LM's `pretrain_gpt.py` since v1.0 are known here, with those of its branch `dev` (August
2026), and those of forks (Megatron-DeepSpeed, Pai-Megatron-Patch, MindSpeed-LLM, MegaBlocks) that most of their
scripts have. This page is printed by `python tools/list_flags.py`; other differences are in
[from_megatron.md](from_megatron.md). Check a launch script as a whole, on any machine, by

    python pretrain_gpt.py ALL ITS FLAGS --dry-run --world-size N
"""


def main() -> None:
    """Print the page."""
    print(page(), end="")


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([HEAD, *_settings(), *_translated(), *_accepted(), *_dependent(), *_refused()])


def _settings() -> list[str]:
    rows = [f"| {section} | {_shown(typing.get_type_hints(kind))} |" for section, kind in section_types().items()]
    rows.append(f"| command line | {_shown(command_line())} |")
    text = "## Done\n\nThey have Megatron-LM's meaning, or are this project's own; `--help` explains each.\n"
    return [text, "| section | flags |", "|---|---|", *rows, ""]


def _translated() -> list[str]:
    rows = [f"| {_flag(name)} | `{' '.join(ours)}` |" for name, ours in megatron_flags.SAME_AS.items()]
    rows += [f"| {_flag(name)} | `{_plain(ours)}` |" for name, ours in aliases().items()]
    rows += [
        f"| {_flag(name)} | `{' '.join(ours)}`, unless such a flag is given, too |"
        for name, ours in megatron_flags.OVERRIDDEN_BY_FLAG.items()
    ]
    for flag, ours in megatron_flags.VALUE_MEANS.items():
        name, _, value = flag.partition("=")
        rows.append(f"| `{_plain(name)} {value}` | `{' '.join(ours)}` |")
    rows += [
        f"| `{_plain(name)} {theirs}` | `{_plain(name)} {ours}` |"
        for name, values in megatron_flags.SAME_VALUE.items()
        for theirs, ours in values.items()
    ]
    return ["## Translated\n", "| flag | the same as |", "|---|---|", *sorted(rows), ""]


def _accepted() -> list[str]:
    text = "## Accepted without effect\n\nA note at the start of a run lists the given ones, with the reason.\n"
    numbers = {reason: len(names.split()) for reason, names in megatron_flags.ACCEPTED.items()}
    families = [
        f"| {name} | {sum(map(numbers.__getitem__, family.reasons))} | {family.loses} |"
        for name, family in megatron_flags.FAMILIES.items()
    ]
    rows = [f"| {reason} | {_shown(names.split())} |" for reason, names in megatron_flags.ACCEPTED.items()]
    only = [f"| `{_plain(name)} {' or '.join(values)}` |" for name, values in megatron_flags.ONLY_VALUE.items()]
    values = "Only these values are supported, which are the behaviour without the flag; others are refused:\n"
    counted = ["| family | flags | what a user of them loses |", "|---|---|---|", *families, ""]
    return [text, *counted, "| reason | flags |", "|---|---|", *rows, "", values, "| flag |", "|---|", *only, ""]


def _dependent() -> list[str]:
    text = "## Belonging to another flag\n\nThey have no effect without it, and are not supported together with it.\n"
    rows = [f"| {_flag(parent)} | {_shown(names.split())} |" for parent, names in megatron_flags.DEPENDENT.items()]
    return [text, "| without | no effect |", "|---|---|", *rows, ""]


def _refused() -> list[str]:
    text = "## Refused\n\nOne error lists all of them, with the fix and all other faults of the settings.\n"
    rows = [f"| {_shown(names.split())} | {reason} |" for reason, names in megatron_flags.REFUSED.items()]
    return [text, "| flags | what is missing, and the fix |", "|---|---|", *rows, ""]


def _plain(name: str) -> str:
    return "--" + name.rstrip("=").replace("_", "-")


def _flag(name: str) -> str:
    return f"`{_plain(name)}`"


def _shown(names: typing.Iterable[str]) -> str:
    return " ".join(map(_flag, sorted(names)))


if __name__ == "__main__":
    run_tool("list_flags.py", main)
