"""Collect the text files of a folder as JSON Lines, one document for each file.

megatron-collect-corpus --output corpus.jsonl

megatron-collect-corpus --folder ~/notes --output corpus.jsonl

Default: the source code of Python's standard library, about 9 MB.
"""

from megatron_core.commands.start import start

if __name__ == "__main__":
    start("collect_corpus")

import ast
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from megatron_core.errors import DataError
from megatron_core.prepared_output import json_line_with, prepare_output
from megatron_core.preprocess.atomic_write import atomic_write
from megatron_core.terminal import parse_flags

LIBRARY_PATTERNS = ("*.py",)
FOLDER_PATTERNS = ("*.txt", "*.md", "*.py")

# Folders that programs write: installed packages and caches.
SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# Tests: a third of the standard library, repetitive, some with deliberate syntax errors. Encodings and topics:
# generated tables, so regular that the loss of a batch would depend more on their share than on the model.
SKIPPED_IN_LIBRARY = {"test", "tests", "idlelib", "idle_test", "lib2to3", "encodings", "pydoc_data"}

CORPUS = json_line_with("corpus that this tool wrote", "text", "path")
NAMES_SHOWN = 5

LONGEST_ANSWER = 400
"""Characters of a docstring's first paragraph; conversations leave longer ones out."""
QUESTIONS = (
    ("What does {name} do?", "{summary}"),
    ("How do I call {name}?", "{name}({arguments})"),
    ("Explain {name} of Python's module {module}.", "{name}({arguments}): {summary}"),
)


@dataclass(frozen=True, kw_only=True)
class CorpusFlags:
    """Collect the text files of a folder as JSON Lines, one document for each file."""

    output: str
    """The JSON Lines file to write."""
    folder: str | None = None
    """Folder to read, with its subfolders; default: the standard library of this Python."""
    pattern: tuple[str, ...] = ()
    """Patterns for file names, in quotes; default *.txt *.md *.py (for the standard library *.py)."""


def find(folder: Path, patterns: Sequence[str], skipped: set[str]) -> Iterator[Path]:
    """The files below a folder whose names match a pattern, sorted; hidden and linked folders are skipped."""
    for parent, folders, names in os.walk(folder):
        # Changed in place: os.walk then visits only these, in this order.
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if any(fnmatch(name, pattern) for pattern in patterns) and path.is_file():
                yield path


def collect_files(settings: CorpusFlags) -> None:
    """Write every file that is UTF-8 text, and report the other files."""
    folder = Path(settings.folder or sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise DataError(f"--folder {folder} is not a folder; give one with text files")
    prepare_output(settings, "output", CORPUS)
    patterns = settings.pattern or (FOLDER_PATTERNS if settings.folder else LIBRARY_PATTERNS)
    skipped = SKIPPED if settings.folder else SKIPPED | SKIPPED_IN_LIBRARY
    # The patterns may match the output of an earlier run or of this one.
    documents = size = 0
    undecodable: list[str] = []
    with atomic_write(settings.output) as file:
        outputs = {os.path.realpath(settings.output), os.path.realpath(file.name)}
        for path in find(folder, patterns, skipped):
            if os.path.realpath(path) in outputs:
                continue
            name = path.relative_to(folder).as_posix()
            try:
                text = path.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                undecodable.append(name)
                continue
            if text.strip():
                line = json.dumps({"text": text, "path": name}, ensure_ascii=False)
                size += file.write(line.encode("utf-8") + b"\n")
                documents += 1
        if undecodable:
            print(left_out(undecodable), file=sys.stderr)
        if not documents:
            raise DataError(
                f"--folder {folder} has no text in files named {' '.join(patterns)} (folders named "
                f"{', '.join(sorted(skipped))} are skipped); choose others with --pattern, or give a folder in those"
            )
    print(f"{settings.output}: {documents:,} documents, {size / 1e6:.1f} MB", flush=True)


def left_out(names: Sequence[str]) -> str:
    """The message about files that are not UTF-8, with the first names."""
    listed = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
    return f"skipped {len(names)} files that are not UTF-8: {listed}"


def library_conversations() -> Iterator[dict[str, object]]:
    """Questions and answers from the docstrings of public functions and classes of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in find(root, LIBRARY_PATTERNS, SKIPPED | SKIPPED_IN_LIBRARY):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        if module.startswith("_") or "._" in module:
            continue
        try:
            nodes = list(ast.parse(path.read_text(encoding="utf-8")).body)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield from _questions_about(node, module)


def _questions_about(node: ast.ClassDef | ast.FunctionDef, module: str) -> Iterator[dict[str, object]]:
    summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    if not 0 < len(summary) <= LONGEST_ANSWER:
        return
    arguments = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
    facts = {"name": f"{module}.{node.name}", "module": module, "arguments": arguments, "summary": summary}
    for question, answer in QUESTIONS if isinstance(node, ast.FunctionDef) else QUESTIONS[:1]:
        texts = {"user": question.format(**facts), "assistant": answer.format(**facts)}
        yield {"messages": [{"role": role, "content": text} for role, text in texts.items()]}


def main() -> None:
    """Parse the flags and run."""
    collect_files(parse_flags(CorpusFlags, description=__doc__))
