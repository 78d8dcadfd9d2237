"""The page of Megatron-LM's flags equals the tables, and the tables have every flag."""

from __future__ import annotations

from pathlib import Path

from megatron_core.config.flags import command_line
from megatron_core.config.run import aliases, field_types
from megatron_core.features.megatron_flags import tables as megatron_flags
from tools.list_flags import page

ROOT = Path(__file__).parents[2]


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/megatron_flags.md").read_text() == page(), (
        "python tools/list_flags.py > docs/megatron_flags.md"
    )


def test_every_flag_of_megatron_is_known() -> None:
    """The list was printed by Megatron-LM's own parser, with a ``=`` after flags that take values; that of flags which
    are gone was read off its releases since v1.0."""
    known, tables = field_types() | command_line(), megatron_flags.FLAGS
    translated = {*megatron_flags.SAME_AS, *aliases(), *megatron_flags.OVERRIDDEN_BY_FLAG}
    unknown = []
    lists = ("megatron_lm_flags.txt", "megatron_lm_old_flags.txt")
    for line in " ".join((ROOT / "tests/config" / each).read_text() for each in lists).split():
        name = line.rstrip("=")[2:].replace("-", "_")
        same = name in known or name in translated or known.get(f"no_{name}") is bool
        if not same and known.get(name.removeprefix("no_")) is not bool and name not in tables:
            unknown.append(name)
        assert name not in tables or tables[name].takes_values == line.endswith("="), name
    assert not unknown
