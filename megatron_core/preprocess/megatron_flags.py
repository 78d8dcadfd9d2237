"""Flags of Megatron-LM's `preprocess_data.py` and its forks that this tool does not have: they are renamed, ignored if
they have no effect here, or refused."""

import sys
from collections.abc import Sequence

from megatron_core.errors import ConfigError
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
WITHOUT_EFFECT: dict[str, list[str]] = _TABLES["without_effect"]
"""Flags, and the values with which they have no effect here."""
RENAMED: dict[str, str] = _TABLES["renamed"]
"""Flags and tokenizer types with a different name here."""
REFUSED = {flag: reason for reason, flags in _TABLES["refused"].items() for flag in flags.split()}
"""Why a flag with any other value is not supported, and the fix."""


def translate(flags: Sequence[str]) -> list[str]:
    """Return the flags without Megatron-LM's flags that have no effect here; the removed flags are listed on stderr.

    ConfigError: a flag is not supported.
    """
    with_effect: list[str] = []
    dropped: list[str] = []
    for flag, values in _grouped(flags):
        name = flag.replace("_", "-")
        words = " ".join([flag, *values])
        if name == "--tokenizer-type":
            values = [RENAMED.get(value, value) for value in values]
        if name in WITHOUT_EFFECT and values == WITHOUT_EFFECT[name]:
            dropped.append(words)
        elif name in REFUSED:
            raise ConfigError(f"{words}: {REFUSED[name]}")
        else:
            with_effect += [RENAMED.get(name, flag), *values]
    if dropped:
        print(f"without effect here: {', '.join(dropped)}", file=sys.stderr)
    return with_effect


def _grouped(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group each flag with its values; `--x=1` stays one word unless only Megatron-LM has the flag."""
    groups: list[tuple[str, list[str]]] = []
    for word in flags:
        if not word.startswith("--") and groups:
            groups[-1][1].append(word)
            continue
        flag, equals, value = word.partition("=")
        foreign = equals and flag.replace("_", "-") in {*REFUSED, *RENAMED}
        groups.append((flag, [value]) if foreign else (word, []))
    return groups
