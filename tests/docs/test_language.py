"""Words that only this project used are not in names, texts and documents: the field has a word for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_core", "csrc", "tests", "tools", "examples", "benchmarks", "docs")
# What to write: the word that is not written.
WORDS = {
    "kernel, backend": r"which body|serving|why_not|plain twin",
    "LayerContext, init_method": r"blueprint|draw_(inner|output)",
    "warm up connections, receive lookahead": r"connect_links|posting\.ahead",
    "start_grad_sync, finish_grad_sync": r"reduce_early|let_go|hand_on|hands on",
    "replica check, untrained-parameter check": r"\bhealth\(|\bmovement\(",
    "baseline, model under test": r"\btruth\b|\brival\b",
    "atomic write, shared memory, worker pool": r"\baside\b|\bshelf\b|\bcrew\b",
    "fix, because, if, available": r"\bmend(s|ed)?\b|want of\b",
}


def sources() -> list[Path]:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pretrain_gpt.py"]
    for folder in FOLDERS:
        paths += (p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".cpp", ".h", ".cu", ".cuh"))
    return [path for path in paths if path != Path(__file__)]


@pytest.mark.parametrize("instead", WORDS)
def test_the_fields_own_words(instead: str) -> None:
    pattern = re.compile(WORDS[instead], re.IGNORECASE)
    found = []
    for path in sources():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, f"write {instead}: " + "\n".join(found)


def test_the_patterns_find_something() -> None:
    texts = ["plain twin", "draw_output", "posting.ahead", "hands on", "health(", "Truth", "aside", "for want of"]
    assert all(re.search(p, text, re.IGNORECASE) for p, text in zip(WORDS.values(), texts, strict=True))
