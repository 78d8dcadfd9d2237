"""The notation of ``--pipeline-model-parallel-layout``: ``Et*3|(tt|)*29,m|L``.

``E`` is the embedding, ``t`` a transformer layer, ``L`` the output layer and the loss, ``m`` a layer of multi-token
prediction; ``|`` separates stages; ``*n`` repeats the letter, the ``|`` or the group in parentheses before it; commas
and spaces are ignored. The notation is Megatron-LM's.
"""

import re
from collections.abc import Iterator

from megatron_core.errors import ConfigError

LETTERS = {"E": "embedding", "t": "transformer layer", "L": "output and loss", "m": "multi-token prediction"}
MOST = 100_000
"""Maximal number of letters and separators after repetition; no model has as many layers."""


def parse_layout(text: str) -> tuple[str, ...]:
    """Return the letters of each stage: ``Et*2|(t|)*2L`` -> ``("Ett", "t", "t", "L")``; a stage may be empty.

    The number of each letter is not checked here. Errors: ``ConfigError`` with the position of the syntax error.
    """
    letters: list[str] = []
    outer: list[tuple[int, list[str]]] = []
    left = MOST
    for index, token in _tokens(text):
        if token == "(":
            outer.append((index, letters))
            letters = []
        elif token == ")" and not outer:
            raise _fault(text, index, "closes nothing", "remove it, or add '('")
        elif token == ")":
            group = "".join(letters)
            _, letters = outer.pop()
            letters.append(group)
        elif token[0] == "*":
            # An empty string after the repeated part prevents a second repetition, as in t*2*3.
            if not letters or not letters[-1]:
                raise _fault(text, index, "repeats nothing", "put it after a letter, a '|' or a group in parentheses")
            # Counted before the text is repeated, whose size a nested repetition multiplies.
            left -= _times(text, index, token) * len(letters[-1])
            if left < 0:
                raise _fault(text, index, f"makes more than {MOST} parts", "repeat less")
            letters += [letters.pop() * int(token[1:]), ""]
        else:
            letters.append(token)
    if outer:
        raise _fault(text, outer[-1][0], "is never closed", "add ')'")
    return tuple("".join(letters).split("|"))


def _tokens(text: str) -> Iterator[tuple[int, str]]:
    """Yield the position and the text of each letter, separator, parenthesis and ``*n``."""
    for match in re.finditer(r"\*[0-9]*|.", text, re.DOTALL):
        token = match[0]
        if token[0] not in "*(|)" and token not in LETTERS and token not in (",", " "):
            known = ", ".join(f"{letter} ({name})" for letter, name in LETTERS.items())
            raise _fault(text, match.start(), "is unknown", f"legal: {known}, |, *n, parentheses, commas")
        if token not in (",", " "):
            yield match.start(), token


def _times(text: str, index: int, token: str) -> int:
    if token == "*":
        raise _fault(text, index, "is not followed by a number", "add the number of repetitions, as in t*3")
    # A number with very many digits would take long to convert, and is too large in any case.
    return int(token[1:]) if len(token) <= len(str(MOST)) + 1 else MOST + 1


def _fault(text: str, index: int, what: str, way_out: str) -> ConfigError:
    return ConfigError(
        f"pipeline_model_parallel_layout={text}: {text[index]!r} at position {index + 1} {what}; {way_out}"
    )
