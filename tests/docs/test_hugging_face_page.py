"""The page about Hugging Face has a row for each architecture, and README.md their number."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_core.hub.hugging_face.architecture import ARCHITECTURES

ROOT = Path(__file__).parents[2]


def test_every_architecture_has_a_row_and_is_counted() -> None:
    page = (ROOT / "docs" / "hugging_face.md").read_text()
    first_cells = re.findall(
        r"^\| (`.*?) \|", page.partition("## Architectures")[2].partition("\n### ")[0], re.MULTILINE
    )
    named = [name for cell in first_cells for name in re.findall(r"`([\w-]+)`", cell) if name != "model_type"]
    known = ARCHITECTURES.keys() - {"invented"}  # of tests
    assert sorted(named) == sorted(known)
    count = re.search(r"import and export of (\d+) architectures", (ROOT / "README.md").read_text())
    assert count is not None and int(count[1]) == len(known)
