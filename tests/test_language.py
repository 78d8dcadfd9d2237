"""Plain English: words and patterns that DESIGN 7 replaces, in names, docstrings, comments, messages and pages."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("megatron_core", "tools", "examples", "pretrain_gpt.py", "docs", "README.md")
NOT_YET = (
    *("benchmarks", "csrc"),
    *(f"megatron_core/{name}" for name in ("config", "drop_in", "optimizer")),
    *(f"megatron_core/{name}" for name in ("transformer", "planner", "models", "tokenizers", "verify")),
    *(f"megatron_core/{name}" for name in ("datasets", "tensor_parallel", "context_parallel", "data_parallel")),
    *(f"megatron_core/{name}" for name in ("pipeline_parallel", "ops", "schedules", "preprocess")),
    *(f"megatron_core/{name}.py" for name in ("command", "errors", "output_file", "parallel_state", "schema")),
    *(f"megatron_core/{name}.py" for name in ("terminal", "text_file")),
    *("tools", "examples", "pretrain_gpt.py", "docs", "README.md"),
)
"""Files and folders that are still to be rewritten."""

WORDS = {
    r"\bso many\b": ("runs of so many tokens", "the number: `length` tokens"),
    r"(?<!here )\b(is|are) no\b(?! longer)": ("--seed is no whole number", "must be ..., or: is not a ..."),
    r"\bwhole numbers?\b": ("a whole number from 1 on", "an integer >= 1"),
    r"\bin vain\b": ("would wait in vain", "would hang"),
    r"\b(go|goes|going|went) on\b": ("goes on from iteration 5", "continues, resuming from"),
    r"\b(is|are|was|were) told\b": ("rank 0 is told", "rank 0 receives, a note is printed"),
    r"\bset(s)? out for\b": ("sets out for the disk", "is written to disk"),
    r"\bfollow (them|it) home\b": ("follow them home", "are sent back to the owning rank"),
    r"\bcome(s)? true\b": ("the condition comes true", "the condition holds"),
    r"\b(has|have) not come\b": ("rank 3 has not come", "rank 3 did not join, has not arrived"),
    r"\bsees? nothing of\b": ("see nothing of one another", "are masked from each other"),
    r"\bwithout a word\b|\bno word of\b": ("fails without a word", "fails without a message"),
    r"\blacks? a legal\b": ("lacks a legal value", "has an invalid value"),
    r"\bto be had\b": ("where it is to be had", "if it is available"),
    r"\bbut for\b": ("all but for the last", "except"),
    r"\bnothing but\b": ("reads nothing but this", "reads only this"),
    r"\b(hence|thence|thereby|therein|thereof|thereupon|wherein|whereof|whereupon|whence|lest|whilst|amongst)\b": (
        "and thereby",
        "so, which, where, so that ... not",
    ),
    r"\b(anew|beside|heed(s|ed)?|of old|nought|hitherto)\b": ("beside the file", "again, next to, previously"),
    r"[A-Z]{2,} (IS|ARE|WAS|WERE) (NOT )?[A-Z]{2,}": ("A CHECKPOINT WAS NOT WRITTEN", "warning: ..., in lower case"),
}
"""Pattern: an example that it must find, and what to write instead."""
FIRST_WORDS = r"(What|Those|That|Whatever|Whoever|Wherever|Of (what|those|which))\b"
"""A docstring begins with a noun or a verb."""


def faults_in(text: str) -> list[str]:
    """Each match of a word or pattern in prose, with the words around it."""
    return [
        f"...{text[max(m.start() - 30, 0) : m.end() + 30]}...: write {instead}"
        for pattern, (_, instead) in WORDS.items()
        for m in re.finditer(pattern, text)
    ]


def prose_of(source: str) -> str:
    """A program as one line: strings and comments of several lines are joined, words of names are separated."""
    joined = re.sub(r"""["']\s*\n\s*[fr]?["']""", "", source)
    joined = re.sub(r"\s*\n\s*(#\s*|//+\s*)?", " ", joined)
    return re.sub(r"(?<=[a-z0-9])_(?=[a-z0-9])", " ", joined)


def docstring_faults(source: str) -> list[str]:
    """Docstrings of modules, classes, functions and attributes that begin with a relative clause."""
    docstrings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return [f"{text[:60]!r}: begin with a noun or a verb" for text in docstrings if re.match(FIRST_WORDS, text)]


def files() -> list[Path]:
    """All programs and pages in ``SOURCES`` but those in ``NOT_YET``."""
    found = [
        path for name in SOURCES for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    return [
        path
        for path in found
        if path.suffix in (".py", ".md", ".yaml", ".sh")
        and not any(path == ROOT / name or ROOT / name in path.parents for name in NOT_YET)
    ]


@pytest.mark.parametrize("pattern", WORDS)
def test_patterns_find_their_examples(pattern: str) -> None:
    example, _ = WORDS[pattern]
    assert re.search(pattern, example)
    assert faults_in(
        prose_of(f'raise ValueError(f"x {example.replace(" ", chr(34) + chr(10) + " f" + chr(34) + " ", 1)}")')
    )
    assert faults_in(prose_of("# " + example.replace(" ", "\n    # ", 1)))


def test_docstrings_with_relative_clauses_are_found() -> None:
    assert len(docstring_faults('"""What it is."""\nx = 1\n"""Those of x."""\n')) == 2
    assert not docstring_faults('"""The length of x."""\n')


def test_language() -> None:
    faults = []
    for path in files():
        text = path.read_text()
        found = faults_in(prose_of(text) if path.suffix == ".py" else " ".join(text.split()))
        found += docstring_faults(text) if path.suffix == ".py" else []
        faults += [f"{path.relative_to(ROOT)}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)
