"""Assignments to variables of a shell script: texts, arrays and maps."""

from __future__ import annotations

import re

from megatron_core.shell.expansion import Variables
from megatron_core.shell.syntax import ASSIGNMENT, tokens


def assign(variables: Variables, word: str, script: str, *, is_map: bool = False) -> None:
    """Follow ``NAME=VALUE``, ``NAME+=VALUE``, ``NAME[INDEX]=VALUE`` or ``NAME=(...)``; ``is_map``: after declare -A."""
    found = ASSIGNMENT.match(word)
    assert found is not None
    name, index, plus = found.groups()
    raw, old = word[found.end() :], variables.values.get(name)
    if raw.startswith("(") and index is None:
        items = [token.text for token in tokens(raw[1:-1], script) if token.is_word]
        keyed = [re.match(r"\[([^]]*)\]=", item) for item in items]
        if is_map or (items and all(keyed)):
            pairs = [
                (variables.text(k[1]), variables.text(i[k.end() :])) for i, k in zip(items, keyed, strict=True) if k
            ]
            variables.assign(name, dict(pairs))
        else:
            before = old if isinstance(old, list) else [old] if isinstance(old, str) else []
            added = [value for item in items for value in variables.fields(item)]
            variables.assign(name, [*(before if plus else []), *added])
        return
    if old is None and re.search(rf"\$(\{{{name}\}}|{name}\b)", raw):
        variables.assign(name, "")  # A="$A --flag" begins a list
    value = variables.text(raw)
    if index is None:
        variables.assign(name, (old if plus and isinstance(old, str) else "") + value)
    elif isinstance(old, dict):
        variables.assign(name, old | {variables.text(index[1:-1]): value})
    else:
        items, key = list(old) if isinstance(old, list) else [], variables.arithmetic(index[1:-1])
        at = int(key) if key.isdigit() and int(key) <= len(items) else len(items)
        variables.assign(name, [*items[:at], value, *items[at + 1 :]])
