"""README's table of measured steps has the figures of benchmarks/results.csv."""

from __future__ import annotations

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_measured_rows_are_in_the_results() -> None:
    with (ROOT / "benchmarks" / "results.csv").open() as file:
        results = [row for row in csv.DictReader(file) if row["benchmark"] == "bench_peers"]
    date = re.search(r"with AVX-512 on (\S+),", README)
    assert date is not None
    measured = [row for row in results if row["date"] == date[1]]
    peers = {(_tokens(row["value"]), f"{float(row['ratio']):.2f}", _megabytes(row)) for row in measured if row["ratio"]}
    ours = {(_tokens(row["value"]), _megabytes(row)) for row in measured if not row["ratio"]}
    earlier = {f"{float(row['ratio']):.2f}" for row in results if "AVX2" in row["machine"] and row["ratio"]}
    table = README.partition("## Measured against others")[2].partition("\n\nReproduce")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    for _, _, tokens, of_peer, ratio, with_avx2, memory, memory_of_peer in rows[1:]:
        assert (tokens, memory) in ours
        assert (of_peer, ratio, memory_of_peer) in peers
        assert with_avx2 in earlier


def _tokens(value: str) -> str:
    return f"{float(value):,.0f}"


def _megabytes(row: dict[str, str]) -> str:
    return f"{int(row['memory_bytes'] or 0) / 1e6:.0f}"
