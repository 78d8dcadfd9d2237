"""Flags that only Megatron-LM's `preprocess_data.py`, or a fork's, has: renamed, accepted where they change nothing,
refused elsewhere."""

import sys
from collections.abc import Sequence

from megatron_core.config.tables import read_table
from megatron_core.errors import ConfigError

_TABLES = read_table(__file__)
WITHOUT_EFFECT: dict[str, list[str]] = _TABLES["without_effect"]
"""Flags, and the only values with which they change nothing here."""
RENAMED: dict[str, str] = _TABLES["renamed"]
"""Flags, and kinds of tokenizers, that have another name here."""
REFUSED = {flag: reason for reason, flags in _TABLES["refused"].items() for flag in flags.split()}
"""Why a flag with any other value cannot be honoured, and the way out."""


def translate(flags: Sequence[str]) -> list[str]:
    """The flags without those of Megatron-LM that change nothing here, which are named on stderr.

    ConfigError: one would change something that cannot be changed here.
    """
    kept: list[str] = []
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
            kept += [RENAMED.get(name, flag), *values]
    if dropped:
        print(f"without effect here: {', '.join(dropped)}", file=sys.stderr)
    return kept


def _grouped(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each flag with the values behind it; `--x=1` stays one word unless the flag is Megatron-LM's alone."""
    groups: list[tuple[str, list[str]]] = []
    for word in flags:
        if not word.startswith("--") and groups:
            groups[-1][1].append(word)
            continue
        flag, equals, value = word.partition("=")
        foreign = equals and flag.replace("_", "-") in {*REFUSED, *RENAMED}
        groups.append((flag, [value]) if foreign else (word, []))
    return groups
