"""Commands in the pages of docs are valid: flags of pretrain_gpt.py, existing tools, and links."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_core.config.cli import parse_run_config
from megatron_core.config.validate import problems, without_data

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TEXTS = {page: page.read_text() for page in PAGES}


def _commands() -> list[str]:
    """The lines of all shell blocks, joined at backslashes."""
    blocks = (block for text in TEXTS.values() for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL))
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


TRAININGS = sorted(
    {line for line in _commands() if " pretrain_gpt.py " in line and not re.search(r"\.\.\.|--help", line)}
)


@pytest.mark.parametrize("line", TRAININGS)
def test_settings_are_legal(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)
    start = words.index("pretrain_gpt.py")
    launcher, flags = words[:start], words[start + 1 :]
    given = dict(pairwise(words))
    nodes = int(given.get("--nnodes", "1").split(":")[-1]) if "--nnodes" in launcher else 1
    world_size = int(given.get("--world-size", nodes * int(given.get("--nproc-per-node", 1))))
    flags = [flag for flag in flags if flag != "--dry-run"]
    for own in ("--world-size", "--rank"):
        if own in flags:
            at = flags.index(own)
            del flags[at : at + 2]
    if "--load-hf" in flags:  # the model's folder has it
        flags += ["--vocab-size", "256"]
    assert list(problems(without_data(parse_run_config(flags)), world_size)) == []


def test_there_are_commands_and_their_programs() -> None:
    assert len(TRAININGS) > 15
    programs = {word for line in _commands() for word in line.split() if re.fullmatch(r"[\w/]+\.(py|sh)", word)}
    on_pages = set(re.findall(r"^# (\w+\.py)$", "\n".join(TEXTS.values()), flags=re.MULTILINE))
    missing = {name for name in programs - on_pages - {"my_training.py", "train.py"} if not (ROOT / name).is_file()}
    assert len(programs) > 10 and not missing


def test_links_lead_to_files_and_headings() -> None:
    prose = {page: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for page, text in TEXTS.items()}
    headings = {
        page: {
            re.sub(r"[^\w\- ]", "", found.lower()).replace(" ", "-") for found in re.findall(r"^#+ (.*)$", text, re.M)
        }
        for page, text in prose.items()
    }
    links = [(page, link) for page, text in prose.items() for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    own = [(page, *link.partition("#")[::2]) for page, link in links if not link.startswith("http")]
    assert len(own) > 20
    for page, name, heading in own:
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), (page.name, name)
        assert not heading or heading in headings[target], (page.name, name, heading)


def test_the_index_links_every_page() -> None:
    """Except pages of results, which other pages link."""
    index = TEXTS[ROOT / "docs" / "index.md"]
    pages = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "index.md"]
    missing = [name for name in pages if f"({name}" not in index and not name.startswith("equal_bits_")]
    assert missing == ["megatron_unit_tests.md"]


def test_rows_of_a_table_have_the_same_number_of_cells() -> None:
    tables = [
        (page, table)
        for page, text in TEXTS.items()
        for table in re.findall(r"^(?:\|.*\n)+", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.M)
    ]
    assert len(tables) > 50
    for page, table in tables:
        head, line, *rows = [re.sub(r"\\\|", "", row).split("|")[1:-1] for row in table.splitlines()]
        assert all(re.fullmatch(r"-+|:?-+:", cell) for cell in line), (page.name, table[:80])
        assert [row for row in (head, *rows) if len(row) != len(line)] == [], page.name


def test_files_of_walks_exist() -> None:
    """Paths in CONTRIBUTING.md's walks are relative to the repository or to the package; a step has at most 20."""
    walks = re.search(r"\n## Walks\n(.*?)\n## ", TEXTS[ROOT / "CONTRIBUTING.md"], flags=re.DOTALL)
    assert walks is not None
    named = re.findall(r"`([\w/]+/[\w/]*\.py)`", walks[1])
    assert [name for name in named if not any((root / name).is_file() for root in (ROOT, ROOT / "megatron_core"))] == []
    step = re.search(r"### To follow one step.*?\n(?=### |\Z)", walks[1], flags=re.DOTALL)
    assert step is not None and 0 < len(re.findall(r"^\d+\. ", step[0], flags=re.MULTILINE)) <= 20
