"""Assignments to variables of a shell script: texts, arrays and maps."""

import re

from megatron_core.shell.expansion import Variables
from megatron_core.shell.tokens import ASSIGNMENT, INDEX, tokens

_KEYED = re.compile(rf"{INDEX}=")


def assign_word(variables: Variables, word: str, script: str, *, is_map: bool = False) -> None:
    """Follow ``NAME=VALUE``, ``NAME+=VALUE``, ``NAME[INDEX]=VALUE`` or ``NAME=(...)``; ``is_map``: after declare -A."""
    match = ASSIGNMENT.match(word)
    assert match is not None
    name, index, plus = match.groups()
    raw = word[match.end() :]
    if raw.startswith("(") and index is None:
        _assign_items(variables, name, raw, script, adds=bool(plus), is_map=is_map)
    elif index is not None:
        before = variables.text(f"${{{name}[{index}]-}}") if plus else ""
        variables.assign_element(name, index, before + variables.text(raw))
    else:
        if variables.get(name) is None and re.search(rf"\$(\{{{name}\}}|{name}\b)", raw):
            variables.assign(name, "")  # A="$A --flag" begins a list
        assign_text(variables, name, variables.text(raw), adds=bool(plus))


def assign_text(variables: Variables, name: str, value: str, *, adds: bool) -> None:
    """Set a variable to a text; of an array its first element, of a map the one called 0."""
    old = variables.get(name)
    if isinstance(old, (list, dict)):
        variables.assign_element(name, "0", (variables.text(f"${{{name}[0]-}}") if adds else "") + value)
    elif adds and isinstance(old, str):
        variables.assign(name, f"({old})+({value})" if name in variables.integers else old + value)
    else:
        variables.assign(name, value)


def _assign_items(variables: Variables, name: str, raw: str, script: str, *, adds: bool, is_map: bool) -> None:
    """Follow ``NAME=(...)`` or ``NAME+=(...)``."""
    old = variables.get(name)
    items = [token.text for token in tokens(raw[1:-1], script) if token.is_word]
    keyed = [_KEYED.match(item) for item in items]
    if is_map or isinstance(old, dict) or (items and all(keyed)):
        pairs = [(variables.text(k[1]), variables.text(i[k.end() :])) for i, k in zip(items, keyed, strict=True) if k]
        if items and not any(keyed):
            words = variables.all_fields(items)
            pairs = list(zip(words[::2], [*words[1::2], ""], strict=False))
        values = (old if adds and isinstance(old, dict) else {}) | dict(pairs)
        is_list = not (is_map or isinstance(old, dict)) and sorted(values) == sorted(map(str, range(len(values))))
        variables.assign(name, [values[str(index)] for index in range(len(values))] if is_list else values)
        return
    before = list[str]()
    if adds and isinstance(old, list):
        before = old
    elif adds and isinstance(old, str):
        before = [old]
    variables.assign(name, [*before, *variables.all_fields(items)])
