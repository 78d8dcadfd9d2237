"""Plain English: words and patterns that DESIGN 7 replaces, in names, docstrings, comments, messages and pages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = (
    *("megatron_core", "csrc", "tools", "examples", "benchmarks", "tests", "docs"),
    *("pretrain_gpt.py", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile"),
)

WORDS = {
    # Indirect English.
    r"\bso many\b": ("runs of so many tokens", "the number: `length` tokens"),
    r"(?<!here )\b(is|are) no\b(?! longer)": ("--seed is no whole number", "must be ..., or: is not a ..."),
    r"\bwhole numbers?\b": ("a whole number from 1 on", "an integer >= 1"),
    r"\bin vain\b": ("would wait in vain", "would hang"),
    r"\b(go|goes|going|went) on\b": ("goes on from iteration 5", "continues, resuming from"),
    r"\b(is|are|was|were) told\b": ("rank 0 is told", "rank 0 receives, a note is printed"),
    r"\bset(s)? out for\b": ("sets out for the disk", "is written to disk"),
    r"\bfollow (them|it) home\b": ("follow them home", "are sent back to the owning rank"),
    r"\bc(o|a)mes? true\b": ("the condition comes true", "the condition holds"),
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
    r"\b[A-Z]{3,} (IS|ARE|WAS|WERE) (NOT )?[A-Z]{2,}": ("CHECKPOINT WAS NOT WRITTEN", "warning: ..., in lower case"),
    # Words that only this project used; the field has others.
    r"\b(which body|serving|why_not|plain twin)\b": ("its plain twin", "kernel, backend"),
    r"\bblueprint\b|\bdraw_(inner|output)\b": ("draw_output", "LayerContext, init_method"),
    r"\bconnect_links\b|\bposting\.ahead\b": ("posting.ahead", "warm up connections, receive lookahead"),
    r"\b(reduce_early|let_go|hand_on|hands on)\b": ("hands on", "start_grad_sync, finish_grad_sync"),
    r"\b(health|movement)\(": ("health(", "replica check, untrained-parameter check"),
    r"\b([Tt]ruth|[Rr]ival)\b": ("the truth", "baseline, model under test"),
    r"\b(aside|shelf|crew)\b": ("put aside", "atomic write, shared memory, worker pool"),
    r"\bmend(s|ed)?\b|\bwant of\b": ("for want of", "fix, because, if, available"),
}
"""Pattern: an example that it must find, and what to write instead."""
FIRST_WORDS = r'"""(What|Those|That|Whatever|Whoever|Wherever|Of (what|those|which))\b[^"\n]{,50}'
"""A docstring begins with a noun or a verb."""
PYTHON, OTHERS = (".py",), (".md", ".yaml", ".sh", ".h", ".cpp", ".cu", ".cuh")


def faults_in(text: str) -> list[str]:
    """Each match of a pattern, with the words around it."""
    return [
        f"...{text[max(m.start() - 30, 0) : m.end() + 30]}...: write {instead}"
        for pattern, (_, instead) in WORDS.items()
        for m in re.finditer(pattern, text)
    ]


def prose_of(source: str) -> str:
    """The source as one line: strings and comments of several lines are joined."""
    joined = re.sub(r"""["']\s*\n\s*[fr]?["']""", "", source)
    return re.sub(r"\s*\n\s*(#+\s|//+\s)?\s*", " ", joined)


def docstring_faults(source: str) -> list[str]:
    """Docstrings of modules, classes, functions and attributes that begin with a relative clause."""
    return [f"{m.group()[3:]!r}: begin with a noun or a verb" for m in re.finditer(FIRST_WORDS, source)]


def sources() -> list[Path]:
    """The files of ``SOURCES``."""
    paths = [
        path for name in SOURCES for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    return [
        path
        for path in paths
        if (path.suffix in PYTHON + OTHERS or path.name == "Makefile")
        and path.is_file()
        and path != Path(__file__)
        and "editable" not in path.parts  # the build folder of an editable installation
    ]


@pytest.mark.parametrize("pattern", WORDS)
def test_patterns_find_their_examples(pattern: str) -> None:
    """Also in a string of two literals and in a comment of two lines."""
    example, _ = WORDS[pattern]
    assert faults_in(prose_of('f"' + example.replace(" ", ' "\n    f"') + '"'))
    assert faults_in(prose_of("# " + example.replace(" ", "\n    # ")))


def test_docstrings_with_relative_clauses_are_found() -> None:
    assert len(docstring_faults('"""What it is."""\nx = 1\n"""Those of x."""\n')) == 2
    assert not docstring_faults('"""The length of x."""\n')


def test_language() -> None:
    faults = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        found = faults_in(prose_of(text)) + (docstring_faults(text) if path.suffix in PYTHON else [])
        faults += [f"{path.relative_to(ROOT)}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


def columns_outside_of_blocks(source: str) -> Iterator[str]:
    """Lines of docstrings with columns that are not indented: a formatter of paragraphs would join them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            margin = " " * node.col_offset
            lines = node.value.value.splitlines()[1:]
            yield from (line for line in lines if re.match(rf"{margin}\S.* {{3,}}\S", line))


def test_columns_of_docstrings_are_indented() -> None:
    joined = '"""A folder.\n\nSAVE/latest.txt       the newest SAVE/iter_1/    its files\n"""'
    assert list(columns_outside_of_blocks(joined)) == ["SAVE/latest.txt       the newest SAVE/iter_1/    its files"]
    assert not list(columns_outside_of_blocks('"""A folder.\n\n    latest.txt       the newest\n"""'))
    paths = [path for path in (ROOT / "megatron_core").rglob("*.py") if "drop_in/deepspeed-" not in str(path)]
    assert len(paths) > 600
    texts = {path: text for path in paths if re.search(r"\S {3,}\S", text := path.read_text())}
    faults = [f"{path}: {line}" for path, text in texts.items() for line in columns_outside_of_blocks(text)]
    assert not faults, "\n".join(faults)
